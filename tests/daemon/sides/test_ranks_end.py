"""The ends of an engine's ranks: it has left with the first of them, and is gone with the last."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvferry.daemon.core.limits import Name
from kvferry.daemon.sides import workers as side_workers
from kvferry.daemon.sides.tasks import SideTasks
from kvferry.daemon.sides.workers import Ranks, SideWorkers
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.mapping.segment import FileLock
from tests.daemon.sides.test_effects import Decode
from tests.daemon.sides.worker_ends import WorkerEnds

NAME = Name(bytes(16), 1)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_workers, "PROOF_SECONDS", 0.01)
    monkeypatch.setattr(side_workers, "SETTLE_SECONDS", 0.01)


def held_lock(path: str) -> FileLock:
    """A session file's, as a rank's process holds it."""
    lock = FileLock.open(path)
    assert lock.try_acquire()
    return lock


async def until_lost(workers: SideWorkers, count: int) -> None:
    while workers.lost != count:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("proven", [0, 1], ids=["rank 0 is proven first", "rank 1 is proven first"])
@pytest.mark.parametrize("leaves", [0, 1], ids=["rank 0 leaves first", "rank 1 leaves first"])
@pytest.mark.parametrize("quiesced", [True, False], ids=["quiesced", "lost"])
def test_an_engine_is_gone_when_the_end_of_each_rank_is_proven(
    tmp_path: Path, proven: int, leaves: int, quiesced: bool
) -> None:
    """One is quiesced, or its lock is free; the other one's stream breaks, and its lock is held for longer: it may
    write the pages of the engine's requests until then."""

    async def story() -> None:
        ends = WorkerEnds()
        workers = SideWorkers(str(tmp_path / "worker-"), ends, SideTasks("decode"))
        ranks = [workers.make("w", bytes(32), ()) for _ in range(2)]
        Ranks.join(ranks)
        locks = [held_lock(rank.lock.path) for rank in ranks]
        for rank in ranks:
            workers.enter(rank)
            workers.attach(rank)
        ranks[proven].quiesced = quiesced
        for number in (leaves, 1 - leaves):
            workers.leave(ranks[number])
        left = [("left", 1), ("lost", 1)]
        assert ends.told == left
        locks[proven].close()
        await until_lost(workers, 1)
        await asyncio.sleep(0.1)
        assert ends.told == left and workers.may_write == 1, "the other one may still write"
        locks[1 - proven].close()
        await until_lost(workers, 0)
        assert ends.told == [*left, ("gone", 1)] and workers.may_write == 0

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_request_that_a_rank_opens_behind_the_end_of_another_is_not_taken(tmp_path: Path) -> None:
    """Nobody would end it: to the core its worker is lost."""

    async def story() -> None:
        side = Decode()
        admit = wire.Admit(name=NAME.to_proto(), tokens=4, digests=bytes(32), prefill="p", max_new_tokens=1)
        opening = wire.WorkerMessage(admit=admit)
        locks = [FileLock.create(str(tmp_path / f"rank-{rank}")) for rank in range(2)]
        ranks = [side.enter(0, asyncio.Queue(), lock) for lock in locks]
        Ranks.join(ranks)
        side.hear(ranks[0], "admit", opening)
        side.workers.leave(ranks[0])
        side.hear(ranks[1], "admit", opening)
        assert side.ready_core.running + side.ready_core.waiting_requests == 0
        await side.tasks.close()
        side.workers.close()

    asyncio.run(story())
