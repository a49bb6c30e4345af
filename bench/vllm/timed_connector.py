"""The connector with its hooks timed, and what KVFerryScheduler adds to vLLM's: CPU seconds of each step, to a file a
process. In a decode engine the hooks of every other block of steps do nothing unless there is something to be done, so
that the steps' times can be compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from timed_steps import StepClock

from kvferry.connectors.vllm.connector import KVFerryConnector, KVFerryMetadata
from kvferry.connectors.vllm.scheduler import KVFerryScheduler

SCHEDULER = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "reset_cache",
    "reports_now",
    "take_first_tokens",
    "count_first_token",
)
WORKER = (
    "start_load_kv",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
)
LAST = ("update_connector_output", "build_connector_worker_meta")


class TimedConnector(KVFerryConnector):
    """A step begins with `build_connector_meta` in the scheduler's process, `bind_connector_metadata` in the worker's;
    its last hooks are `update_connector_output` and `build_connector_worker_meta`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        folder = os.environ["HOOK_TIMES"]
        side = f"{vllm_config.kv_transfer_config.kv_role}-{role.name.lower()}"
        file = open(os.path.join(folder, side), "w")  # noqa: SIM115
        # prefill's chunks are saved at every step
        self._clock = StepClock(file, always=vllm_config.kv_transfer_config.kv_role == "kv_producer")
        for name in (*SCHEDULER, *WORKER):
            setattr(self, name, self.timed(getattr(self, name), last=name in LAST))

    def timed(self, hook: Callable[..., Any], *, last: bool = False) -> Callable[..., Any]:
        """A hook whose time counts, once where it is called within another."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, began = self._clock.spent, time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                self._clock.spent = before + time.thread_time() - began
                if last:
                    self._clock.last_hook(time.monotonic())

        return timed

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._clock.begin(time.monotonic(), scheduler_output.total_num_scheduled_tokens)
        if not (self._clock.runs or self._deciding._orders or scheduler_output.preempted_req_ids):
            return KVFerryMetadata()
        return self.timed(super().build_connector_meta)(scheduler_output)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._clock.begin(time.monotonic(), 1)
        if self._clock.runs or connector_metadata.orders.orders or connector_metadata.orders.preempted:
            self.timed(super().bind_connector_metadata)(connector_metadata)
        else:
            self._connector_metadata = connector_metadata

    def wait_for_save(self) -> None:
        if self._clock.runs or self._working.awaits_step:
            self.timed(super().wait_for_save)()


def _timed_addition(scheduler: KVFerryScheduler, outputs: Any, ours: TimedConnector) -> None:
    ours.timed(_addition)(scheduler, outputs, ours)


_addition = KVFerryScheduler._add
KVFerryScheduler._add = _timed_addition  # type: ignore[method-assign]
