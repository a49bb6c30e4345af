"""The connector's counts among vLLM's own: in its log ("KV Transfer metrics") and at its /metrics."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry.connectors.worker_state import Moved

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MEANINGS = {
    "loads": "Requests whose KV cache was loaded into the engine's blocks.",
    "load_seconds": "Seconds from a request's order to load until its blocks were loaded.",
    "loaded_bytes": "Bytes copied from the daemon's pages into the engine's blocks, on all ranks.",
    "saved_bytes": "Bytes copied from the engine's blocks into the daemon's pages, on all ranks.",
    "pushed": "Prompts that prefill handed over whole.",
    "stored": "Finished requests whose blocks the daemon took.",
    "resets": "Times that all under way was given up: caches were reset, or another connector loaded behind a reset.",
    "failed": "Requests that the engine went on with alone, by each of its ranks that they failed on.",
    "first_tokens": "Replies that began with the first token of the prefill engine.",
}
"""The counters vllm:kvferry_<name>_total: the fields of `worker_state.Moved`, and what the scheduler's half counts."""
_OF_RANK_0 = {"loads", "load_seconds", "pushed", "stored", "resets"}
"""Each rank of an engine counts the same requests, and vLLM adds up what they tell: one rank alone tells these."""
_MOVED = tuple(field.name for field in dataclasses.fields(Moved))
counts_of: Callable[[Moved], tuple[float, ...]] = operator.attrgetter(*_MOVED)
"""The fields of `Moved`, as they are now."""


class KVFerryStats(KVConnectorStats):  # type: ignore[misc]
    """The growth of `Moved` in a time, by field; fields that did not grow are left out."""

    @staticmethod
    def between(before: tuple[float, ...], after: tuple[float, ...], rank: int) -> KVFerryStats:
        """The growth on one rank between two times; each is what `counts_of` gave then."""
        pairs = zip(_MOVED, before, after, strict=True)
        grown = {name: now - then for name, then, now in pairs if now != then}
        if rank != 0:
            grown = {name: by for name, by in grown.items() if name not in _OF_RANK_0}
        return KVFerryStats(data=grown)

    data: dict[str, int | float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVFerryStats:
        for name, by in other.data.items():
            self.data[name] = self.data.get(name, 0) + by
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs of an interval: the counts, times and sizes in milliseconds and MiB."""
        told = {
            name: by for name, by in self.data.items() if not name.endswith("bytes") and name != "load_seconds" and by
        }
        if loads := self.data.get("loads"):
            told["mean load ms"] = round(1000 * self.data.get("load_seconds", 0.0) / loads, 2)
        for name in ("loaded_bytes", "saved_bytes"):
            if nbytes := self.data.get(name):
                told[name.replace("_bytes", " MiB")] = round(nbytes / (1 << 20), 1)
        return told

    def is_empty(self) -> bool:
        return not self.data


class KVFerryCounters(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters vllm:kvferry_*_total of each engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                metric_types[Counter](name=f"vllm:kvferry_{name}", documentation=meaning, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, meaning in MEANINGS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, by in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(by)


assert set(MEANINGS) == {*_MOVED, "first_tokens"}
