"""The connector with its hooks timed, and what KVFerryScheduler adds to vLLM's: CPU seconds of each step, to a file a
process (HOOK_TIMES, a folder). In a decode engine the hooks of every other block of steps do nothing unless there is
something to be done, so that the steps' times can be compared; with HOOK_ALWAYS all run.
"""

from __future__ import annotations

import os
import time
from typing import Any

from timed_steps import StepClock

from kvferry.connectors.vllm.connector import IDLE, NOTHING, KVFerryConnector
from kvferry.connectors.vllm.scheduler import KVFerryScheduler

OF_REQUESTS = (  # none is called but for a request's sake
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished",
    "request_finished_all_groups",
    "reset_cache",
    "reports_now",
    "take_first_tokens",
    "count_first_token",
)
OF_STEPS = (  # each tells by its result whether there was anything to do
    "start_load_kv",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
)


def _is_something(result: Any) -> bool:
    return any(result) if isinstance(result, tuple) else result not in (None, set(), NOTHING, IDLE)


class TimedConnector(KVFerryConnector):
    """A step begins with `build_connector_meta` in the scheduler's process, `bind_connector_metadata` in the worker's;
    its last hooks are `update_connector_output` and `build_connector_worker_meta`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        folder = os.environ["HOOK_TIMES"]
        side = f"{vllm_config.kv_transfer_config.kv_role}-{role.name.lower()}"
        file = open(os.path.join(folder, side), "w", buffering=1)  # noqa: SIM115
        # prefill's chunks are saved at every step
        always = "HOOK_ALWAYS" in os.environ or vllm_config.kv_transfer_config.kv_role == "kv_producer"
        self._clock = StepClock(file, always)
        self.timed = self._clock.timed
        for name in OF_REQUESTS:
            setattr(self, name, self.timed(getattr(self, name)))
        for name in OF_STEPS:
            setattr(self, name, self.timed(getattr(self, name), _is_something))

    def leave_out(self, scheduler: KVFerryScheduler) -> None:
        """vLLM's own work behind any connector's load: the prompt's blocks are cached, a stored one's are freed."""
        manager, frees = scheduler.kv_cache_manager, scheduler._update_from_kv_xfer_finished
        manager.cache_blocks = self._clock.left_out(manager.cache_blocks)
        scheduler._update_from_kv_xfer_finished = self._clock.left_out(frees)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._clock.begin(time.monotonic(), scheduler_output.total_num_scheduled_tokens)
        if not (self._clock.runs or self._deciding.has_orders or scheduler_output.preempted_req_ids):
            return NOTHING if scheduler_output.total_num_scheduled_tokens else IDLE
        return self.timed(super().build_connector_meta, _is_something)(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        told = (
            connector_output.finished_sending,
            connector_output.finished_recving,
            connector_output.kv_connector_worker_meta,
        )
        self.timed(super().update_connector_output, lambda result: any(told))(connector_output)
        self._clock.last_hook(time.monotonic())

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._clock.begin(time.monotonic(), int(connector_metadata.computes))
        orders = connector_metadata.orders
        told = orders is not None and bool(orders.orders or orders.preempted)
        if self._clock.runs or told:
            self.timed(super().bind_connector_metadata, lambda result: told)(connector_metadata)

    def wait_for_save(self) -> None:
        if self._clock.runs or self._working.awaits_step:
            self.timed(super().wait_for_save)()

    def build_connector_worker_meta(self) -> Any:
        news = self.timed(super().build_connector_worker_meta, _is_something)()
        self._clock.last_hook(time.monotonic())
        return news


def _init_timed(scheduler: KVFerryScheduler, *args: Any, **kwargs: Any) -> None:
    _init(scheduler, *args, **kwargs)
    if isinstance(ours := scheduler._kvferry, TimedConnector):
        ours.leave_out(scheduler)


def _timed_addition(scheduler: KVFerryScheduler, outputs: Any, ours: TimedConnector) -> None:
    news = ours.has_news
    ours.timed(_addition, lambda result: news)(scheduler, outputs, ours)


_init, _addition = KVFerryScheduler.__init__, KVFerryScheduler._add
KVFerryScheduler.__init__ = _init_timed  # type: ignore[method-assign]
KVFerryScheduler._add = _timed_addition  # type: ignore[method-assign]
