"""The coming together of an engine's ranks: all are taken in, in their order, or none, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest

from kvferry.client.one_rank import TOGETHER_SECONDS
from kvferry.daemon.core.errors import RequestError, exhausted
from kvferry.daemon.sides import gathering as gathering_module
from kvferry.daemon.sides.gathering import Gathering, Welcomes, together
from kvferry.daemon.sides.tasks import SideTasks
from kvferry.daemon.sides.workers import SideWorkers, Worker
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire

RANKS, MOST = 3, 2


def hello(rank: int, engine: str = "engine", *, ranks: int = RANKS, pages: int = 0) -> wire.WorkerHello:
    message = wire.WorkerHello(worker=f"rank {rank}", rank=wire.OneRank(rank=rank, ranks=ranks, engine=engine))
    if pages:
        message.pool.pages = pages
        message.pool.ranks.add()
    return message


class House:
    """What is behind the gathering: it takes engines in, and is told who leaves."""

    def __init__(self) -> None:
        self.taken: list[list[str]] = []
        self.left: list[str] = []
        self.refusal: RequestError | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.gathering = Gathering(RANKS, MOST, cast(SideWorkers, self), self.take_in, SideTasks("decode"))

    async def take_in(self, hellos: Sequence[wire.WorkerHello]) -> Welcomes:
        await self.open.wait()
        if self.refusal is not None:
            raise self.refusal
        names = [each.worker for each in hellos]
        self.taken.append(names)
        return [(cast(Worker, name), wire.Welcome(daemon=name)) for name in names]

    def leave(self, worker: Worker) -> None:
        self.left.append(cast(str, worker))

    def joins(self, message: wire.WorkerHello) -> asyncio.Task[tuple[Worker, wire.Welcome]]:
        return asyncio.create_task(self.gathering.join(message))


def told(story: Callable[[House], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(story(House()), 20)

    asyncio.run(whole())


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def refused(*joining: asyncio.Task[tuple[Worker, wire.Welcome]], match: str) -> list[common.ErrorCode]:
    codes = []
    for task in joining:
        with pytest.raises(RequestError, match=match) as error:
            await task
        codes.append(error.value.code)
    return codes


def test_all_are_taken_in_at_once_by_rank_whichever_comes_first() -> None:
    async def story(house: House) -> None:
        joining = [house.joins(hello(rank)) for rank in (2, 0)]
        await turns()
        assert house.taken == [] and not any(task.done() for task in joining)
        joining.append(house.joins(hello(1)))
        welcomes = [(await task)[1].daemon for task in joining]
        assert house.taken == [["rank 0", "rank 1", "rank 2"]] and welcomes == ["rank 2", "rank 0", "rank 1"]

    told(story)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (hello(0, ranks=2), r"rank\.ranks is 2; this daemon's --ranks is 3"),
        (hello(3), r"rank\.rank is 3; it must be below rank\.ranks = 3"),
        (hello(0, ""), r"rank\.engine has 0 characters"),
        (hello(0, "e" * 129), r"rank\.engine has 129 characters; it must have 1 to 128"),
    ],
)
def test_what_is_no_rank_of_this_daemons_waits_for_nobody(wrong: wire.WorkerHello, match: str) -> None:
    async def story(house: House) -> None:
        await refused(house.joins(wrong), match=match)

    told(story)


def test_ranks_of_two_engines_never_meet() -> None:
    async def story(house: House) -> None:
        joining = [house.joins(hello(rank, engine)) for rank, engine in ((0, "a"), (1, "b"), (2, "a"))]
        await turns()
        assert house.taken == []
        for task in joining:
            task.cancel()
        await asyncio.wait(joining)

    told(story)


def test_engines_that_wait_have_a_bound() -> None:
    async def story(house: House) -> None:
        waiting = [house.joins(hello(0, f"engine {number}")) for number in range(MOST)]
        await turns()
        codes = await refused(house.joins(hello(0, "one more")), match="2 engines wait for their ranks already")
        assert codes == [common.ERROR_RESOURCE_EXHAUSTED]
        waiting[0].cancel()  # its place is another's
        await asyncio.wait([waiting[0]])
        joining = [house.joins(hello(rank, "one more")) for rank in range(RANKS)]
        await asyncio.gather(*joining)
        waiting[1].cancel()
        await asyncio.wait(waiting)

    told(story)


def test_none_waits_longer_than_the_bound_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering_module, "GATHER_SECONDS", 0.05)

    async def story(house: House) -> None:
        joining = [house.joins(hello(rank)) for rank in (0, 2)]
        match = r"ranks \[1\] of the engine have not come within 0\.05 s"
        assert set(await refused(*joining, match=match)) == {common.ERROR_UNAVAILABLE}
        monkeypatch.setattr(gathering_module, "GATHER_SECONDS", 20.0)
        await asyncio.gather(*(house.joins(hello(rank)) for rank in range(RANKS)))  # nothing of them is left
        assert len(house.taken) == 1

    told(story)


def test_a_rank_waits_until_its_daemon_says_who_has_not_come() -> None:
    assert TOGETHER_SECONDS >= gathering_module.GATHER_SECONDS + 5


def test_one_that_leaves_early_ends_it_for_the_others() -> None:
    async def story(house: House) -> None:
        first, second = house.joins(hello(0)), house.joins(hello(1))
        await turns()
        second.cancel()
        await refused(first, match="rank 1 of the engine has left before all had come")
        await asyncio.wait([second])
        assert house.taken == [] and house.left == []

    told(story)


def test_one_that_leaves_while_all_are_taken_in_leaves_as_soon_as_it_is_there() -> None:
    async def story(house: House) -> None:
        house.open.clear()
        joining = [house.joins(hello(rank)) for rank in range(RANKS)]
        await turns()
        joining[1].cancel()
        await asyncio.wait([joining[1]])
        assert house.left == []
        house.open.set()
        await asyncio.gather(joining[0], joining[2])
        await turns()
        assert house.left == ["rank 1"]

    told(story)


def test_a_process_that_comes_again_begins_anew_and_the_others_are_told() -> None:
    async def story(house: House) -> None:
        first, second = house.joins(hello(0)), house.joins(hello(1))
        await turns()
        again = house.joins(hello(1))
        await refused(first, second, match="rank 1 of the engine has come again")
        others = [house.joins(hello(rank)) for rank in (0, 2)]
        await asyncio.gather(again, *others)
        assert len(house.taken) == 1

    told(story)


def test_what_refuses_the_engine_refuses_every_rank() -> None:
    async def story(house: House) -> None:
        house.refusal = exhausted("no room")
        joining = [house.joins(hello(rank)) for rank in range(RANKS)]
        assert await refused(*joining, match="no room") == [common.ERROR_RESOURCE_EXHAUSTED] * RANKS

    told(story)


def stowing(rank: int) -> wire.WorkerHello:
    message = hello(rank, pages=8)
    message.pool.stows = rank != 1
    return message


LATER = b"\xa0\x06\x01"  # on the wire: a field that no version has as yet


def unlike(rank: int, facts: common.NamespaceFacts, unknown: bytes = b"") -> wire.WorkerHello:
    """Of rank 2 the facts are others."""
    message = hello(rank, pages=8)
    message.facts.CopyFrom(FACTS)
    if rank == 2:
        message.facts.MergeFrom(facts)
        message.facts.MergeFromString(unknown)
    return message


FACTS = common.NamespaceFacts(model="m", geometry=common.Geometry(layers=2, page_size=16))
NAMED = common.NamespaceFacts(model="another", geometry=common.Geometry(page_size=32))
FURTHER = common.NamespaceFacts(geometry=common.Geometry(further=[common.CacheShape(layers=2)]))


@pytest.mark.parametrize(
    ("hellos", "match"),
    [
        (
            [unlike(rank, NAMED) for rank in range(RANKS)],
            r"facts: those of rank 2 are not those of rank 0: model, geometry\.page_size$",
        ),
        ([unlike(rank, FURTHER) for rank in range(RANKS)], r"those of rank 0: geometry\.further$"),
        (
            [unlike(rank, common.NamespaceFacts(), LATER) for rank in range(RANKS)],
            "facts: those of rank 2 are not those of rank 0: what this daemon does not know$",
        ),
        ([hello(0, pages=8), hello(1, pages=9), hello(2, pages=8)], r"pool\.pages is 9 of rank 1, 8 of rank 0"),
        ([stowing(rank) for rank in range(RANKS)], r"pool\.stows is False of rank 1, True of rank 0"),
        ([hello(0), hello(1), wire.WorkerHello(pool=wire.EnginePool(), rank=hello(2).rank)], "ranks 0 and 2 one alone"),
    ],
)
def test_ranks_say_the_same_of_their_engine(hellos: list[wire.WorkerHello], match: str) -> None:
    async def story(house: House) -> None:
        await refused(*(house.joins(each) for each in hellos), match=match)
        assert house.taken == []

    told(story)


def test_together_they_are_one_worker_with_the_memory_of_all() -> None:
    whole = together([hello(rank, pages=8) for rank in range(RANKS)])
    assert len(whole.pool.ranks) == RANKS and whole.pool.pages == 8
    assert not whole.HasField("rank") and whole.worker == "rank 0"
