"""The connector's counts as vLLM adds them up: a request is counted once, whatever the number of ranks."""

from __future__ import annotations

from typing import Any

from tests.connectors.vllm.test_workers_namespace import RANKS, WORKER, Process, half, process, registered

__all__ = ["process"]


def told(process: Process, **counts: float) -> list[Any]:
    """What each rank tells vLLM where all of them have counted that."""
    found = []
    for process.rank in range(RANKS):
        worker = half(WORKER, target_layer_count=32)
        with registered(worker):
            for name, count in counts.items():
                setattr(worker._moved, name, count)
            found.append(worker.get_kv_connector_stats())
            assert worker.get_kv_connector_stats() is None, "it was told"
    return found


def test_requests_are_those_of_rank_0_and_bytes_and_failures_of_all_ranks(process: Process) -> None:
    first, second = told(
        process, loads=3, load_seconds=0.3, pushed=2, stored=1, resets=1, failed=1, loaded_bytes=64, saved_bytes=32
    )
    whole = first.aggregate(second)
    once = {"loads": 3, "load_seconds": 0.3, "pushed": 2, "stored": 1, "resets": 1}
    assert whole.data == once | {"failed": 2, "loaded_bytes": 128, "saved_bytes": 64}
    assert whole.reduce()["mean load ms"] == 100.0


def test_a_rank_that_has_nothing_of_its_own_to_tell_tells_nothing(process: Process) -> None:
    first, second = told(process, pushed=2)
    assert first.data == {"pushed": 2} and second is None
