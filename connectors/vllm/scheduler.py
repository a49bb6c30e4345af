"""vLLM's scheduler, with hand-offs in fewer steps.

--scheduler-cls kvferry.connectors.vllm.scheduler.KVFerryScheduler

vLLM's own hears of a load with the outcome of a step that began when it was over, which is one or two steps later; then
it computes the prompt's last token once more, and samples the reply's first token from that. Here a load is heard of
when the step under way ends, the prefill engine's first token goes to the client at once, and the next step computes
what is behind it, as in a request that goes on after it was preempted. With several ranks the workers are other
processes, and loads are heard of with a step's outcome, as by vLLM's own. Model Runner V2 alone takes a request that it
has never seen, and that has a reply already.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from kvferry.connectors.vllm.connector import KVFerryConnector
from kvferry.connectors.vllm.versions import Call, check_calls

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

_log = logging.getLogger(__name__)

check_calls(
    vllm.__version__,
    Call(Scheduler, "update_from_output", 3),
    Call(Scheduler, "_update_from_kv_xfer_finished", 2),
    Call(Scheduler, "_update_request_with_output", 3),
    Call(Scheduler, "finish_requests", 3),
    Call(KVCacheManager, "allocate_slots", 3, ("num_lookahead_tokens", "delay_cache_blocks")),
    Call(KVCacheManager, "cache_blocks", 3),
    Call(KVCacheManager, "estimate_cached_tokens", 2),
    *(Call(Request, name) for name in ("take_prefill_stats", "take_events", "get_finished_reason")),
    Call(Request, "record_event", 3),
)


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
            why_not = _why_all_is_sampled(vllm_config)
            self._forces = not why_not
            if self._forces:
                self._kvferry.begin_with_first_tokens()
            told = why_not or "replies begin with the token that the prefill engine sampled"
            _log.info("kvferry: %s", told)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        if self._kvferry is not None:
            self._add(outputs, self._kvferry)
        return outputs

    def _add(self, outputs: dict[int, EngineCoreOutputs], ours: KVFerryConnector) -> None:
        """All that is done here behind vLLM's own step."""
        if not ours.has_news:
            return
        # Another connector beside it has words of its own with a step's reports.
        if self.connector is ours and (late := ours.reports_now()) is not None:
            self._update_from_kv_xfer_finished(late)
        for request, token in ours.take_first_tokens() if self._forces else ():
            if self._begins_behind_one(request) and 0 <= token < self._vocabulary and self._has_room(request):
                told = outputs.setdefault(request.client_index, EngineCoreOutputs())
                told.outputs.append(self._begin_behind(request, token, told.timestamp))
                ours.count_first_token()

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
        )

    def _has_room(self, request: Request) -> bool:
        """Takes the block that the token's KV goes to, where that is one more. Requests whose prompts have come can be
        computed whatever the others hold: else they all could wait for each other."""
        room = self.kv_cache_manager.allocate_slots(
            request, 1, num_lookahead_tokens=self.num_lookahead_tokens, delay_cache_blocks=True
        )
        return room is not None

    def _begin_behind(self, request: Request, token: int, now: float) -> EngineCoreOutput:
        """Puts the token into the reply, which may end with it. `now`: the time that is told with it, behind which the
        request cannot have been scheduled."""
        awaited = request.status
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        if (prefill := request.take_prefill_stats()) is not None:
            prefill.finalize(self.kv_cache_manager.estimate_cached_tokens(request))
        # The asynchronous scheduler's own counts a step that is under way for each token.
        _, stopped = Scheduler._update_request_with_output(self, request, [token])
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, now)
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
            prefill_stats=prefill,
        )


class _AsyncKVFerryScheduler(KVFerryScheduler, AsyncScheduler):  # type: ignore[misc]
    pass


def _why_all_is_sampled(vllm_config: VllmConfig) -> str:
    """The reason, for the log; empty: there is none."""
    if not vllm_config.use_v2_model_runner:
        return "replies are sampled here, all of them: Model Runner V1 cannot begin behind a token"
    model, more = vllm_config.model_config, getattr(vllm_config, "aux_output_config", None)
    experts = getattr(model, "enable_return_routed_experts", False) or getattr(more, "enabled", False)
    if experts or getattr(model, "return_sampling_mask", False):
        return "replies are sampled here, all of them: of each token more is told, which the prefill engine's has not"
    return ""


def _kvferry_of(connector: object) -> KVFerryConnector | None:
    """The engine's, which may be one of several."""
    for each in (connector, *getattr(connector, "_connectors", ())):
        if isinstance(each, KVFerryConnector):
            return each
    return None
