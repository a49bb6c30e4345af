"""A scheduler of decode engines in which a reply begins with the token that the prefill engine sampled.

--scheduler-cls kvferry.connectors.vllm.scheduler.FirstTokenScheduler

vLLM's own computes the last token of a prompt once more, whose KV has come, and samples the reply's first token from
that: two steps until there is anything new. Here the first token goes to the client when the prompt has come, and the
next step computes what is behind it, as in a request that goes on after it was preempted. Model Runner V2 alone takes
a request that it has never seen, and that has a reply already.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from kvferry.connectors.vllm.connector import KVFerryConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)


class FirstTokenScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, its asynchronous one where the engine is configured so. Where no first token comes it is that
    and no more."""

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> FirstTokenScheduler:
        asynchronous = vllm_config.scheduler_config.async_scheduling
        return object.__new__(_AsyncFirstTokenScheduler if asynchronous else cls)

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._kvferry: KVFerryConnector | None = None
        found = _kvferry_of(self.connector)
        if found is None:
            _log.warning("first tokens: this engine has no KVFerryConnector as a consumer, which would bring them")
        elif not vllm_config.use_v2_model_runner:
            _log.warning("first tokens: Model Runner V1 cannot begin behind one; this engine samples its own")
        else:
            self._kvferry = found
            found.begin_with_first_tokens()
            _log.info("first tokens: replies begin with what the prefill engine sampled")

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        if self._kvferry is not None:
            for request, token in self._kvferry.take_first_tokens():
                if self._begins_behind_one(request) and 0 <= token < self._vocabulary:
                    told = outputs.setdefault(request.client_index, EngineCoreOutputs())
                    told.outputs.append(self._begin_behind(request, token))
                    self._kvferry.count_first_token()
        return outputs

    @property
    def _vocabulary(self) -> int:
        size: int = self.vllm_config.model_config.get_vocab_size()
        return size

    def _begins_behind_one(self, request: Request) -> bool:
        """Whether it has just its prompt, and the token is all that the client is to have of its first step."""
        asked = request.sampling_params
        return (
            self.requests.get(request.request_id) is request
            and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and request.request_id not in self.failed_recving_kv_req_ids
            and request.num_computed_tokens == request.num_tokens == request.num_prompt_tokens
            and not request.use_structured_output
            and asked is not None
            and asked.logprobs is None
            and getattr(asked, "logprob_token_ids", None) is None
            and not getattr(self.vllm_config.model_config, "enable_return_routed_experts", False)
        )

    def _begin_behind(self, request: Request, token: int) -> EngineCoreOutput:
        """Its reply has this token; that may end it."""
        awaited = request.status
        # The asynchronous scheduler's own counts a step that is under way for each token.
        _, stopped = Scheduler._update_request_with_output(self, request, [token])
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED)
        reason = request.get_finished_reason() if stopped else None
        if stopped:
            ended, request.status = request.status, awaited
            self.finish_requests(request.request_id, ended)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[token],
            finish_reason=reason,
            stop_reason=request.stop_reason,
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )


class _AsyncFirstTokenScheduler(FirstTokenScheduler, AsyncScheduler):  # type: ignore[misc]
    pass


def _kvferry_of(connector: object) -> KVFerryConnector | None:
    """The engine's, which may be one of several."""
    for each in (connector, *getattr(connector, "_connectors", ())):
        if isinstance(each, KVFerryConnector) and each.decodes:
            return each
    return None
