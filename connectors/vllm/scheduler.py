"""vLLM's scheduler, with hand-offs in fewer steps.

--scheduler-cls kvferry.connectors.vllm.scheduler.KVFerryScheduler

vLLM's own hears of a load with the outcome of a step that began when it was over, which is one or two steps later; then
it computes the prompt's last token once more, and samples the reply's first token from that. Here a load is heard of
when the step under way ends, the prefill engine's first token goes to the client at once, and the next step computes
what is behind it, as in a request that goes on after it was preempted. Model Runner V2 alone takes a request that it
has never seen, and that has a reply already.
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


class KVFerryScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, its asynchronous one where the engine is configured so."""

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> KVFerryScheduler:
        asynchronous = vllm_config.scheduler_config.async_scheduling
        return object.__new__(_AsyncKVFerryScheduler if asynchronous else cls)

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._kvferry = _kvferry_of(self.connector)
        self._forces = False  # replies begin with what the prefill engine sampled
        if self._kvferry is None:
            _log.warning("this engine has no KVFerryConnector, for which its scheduler is made")
        elif self._kvferry.decodes:
            self._forces = bool(vllm_config.use_v2_model_runner)
            if self._forces:
                self._kvferry.begin_with_first_tokens()
                _log.info("replies begin with the token that the prefill engine sampled")
            else:
                _log.info("replies are sampled here, all of them: Model Runner V1 cannot begin behind a token")

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        if (ours := self._kvferry) is None:
            return outputs
        # Another connector beside it has words of its own with a step's reports.
        if self.connector is ours and (late := ours.reports_now()) is not None:
            self._update_from_kv_xfer_finished(late)
        for request, token in ours.take_first_tokens() if self._forces else ():
            if self._begins_behind_one(request) and 0 <= token < self._vocabulary:
                told = outputs.setdefault(request.client_index, EngineCoreOutputs())
                told.outputs.append(self._begin_behind(request, token))
                ours.count_first_token()
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


class _AsyncKVFerryScheduler(KVFerryScheduler, AsyncScheduler):  # type: ignore[misc]
    pass


def _kvferry_of(connector: object) -> KVFerryConnector | None:
    """The engine's, which may be one of several."""
    for each in (connector, *getattr(connector, "_connectors", ())):
        if isinstance(each, KVFerryConnector):
            return each
    return None
