"""What a worker does not wait for comes with what is next; nothing is lost, late for ever, or out of order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvferry.client.one_rank import OneRank
from kvferry.daemon.services.worker_events import MOST_LATE, Telling
from kvferry.proto import common_pb2
from kvferry.proto import worker_pb2 as wire

LATE = 0.2


def name(number: int) -> common_pb2.RequestName:
    return common_pb2.RequestName(request_id=number.to_bytes(16, "little"), attempt=1)


def admitted(number: int) -> wire.WorkerEvent:
    return wire.WorkerEvent(admitted=wire.Admitted(name=name(number)))


def ready(number: int) -> wire.WorkerEvent:
    return wire.WorkerEvent(ready=wire.Ready(name=name(number)))


def ended(number: int) -> wire.WorkerEvent:
    return wire.WorkerEvent(ended=wire.Ended(name=name(number)))


class Told:
    """A worker's events, and what it was told of them, by words."""

    def __init__(self, late_seconds: float, *, in_blocks: bool = False) -> None:
        self.events: asyncio.Queue[wire.WorkerEvent] = asyncio.Queue()
        self.words: list[list[str]] = []
        self.at: list[float] = []
        self.telling = Telling(self.events, late_seconds, self._write, in_blocks=in_blocks)
        self._running = asyncio.get_running_loop().create_task(self.telling.run())

    async def _write(self, events: Sequence[wire.WorkerEvent]) -> None:
        self.words.append([str(event.WhichOneof("kind")) for event in events])
        self.at.append(asyncio.get_running_loop().time())

    async def tells(self, *events: wire.WorkerEvent, within: float = 0.02) -> list[list[str]]:
        for event in events:
            self.events.put_nowait(event)
        await asyncio.sleep(within)
        words, self.words = self.words, []
        return words

    async def end(self) -> None:
        self._running.cancel()
        await asyncio.wait((self._running,))


def test_what_a_worker_does_not_wait_for_comes_with_what_is_next() -> None:
    async def story() -> None:
        told = Told(LATE)
        assert await told.tells(admitted(1)) == []
        assert await told.tells(ready(1)) == [["admitted", "ready"]]
        assert await told.tells(ended(1), ended(2)) == []
        assert await told.tells(ready(2)) == [["ended", "ended", "ready"]]
        await told.end()

    asyncio.run(story())


def test_it_is_not_late_for_longer_than_the_worker_said() -> None:
    async def story() -> None:
        told = Told(LATE)
        began = asyncio.get_running_loop().time()
        assert await told.tells(ended(1)) == []
        assert await told.tells(ended(2), within=3 * LATE) == [["ended", "ended"]]
        assert LATE <= told.at[0] - began < 2 * LATE, "the first one's time counts"
        await told.end()

    asyncio.run(story())


def test_who_has_pages_of_its_own_to_fill_is_admitted_at_once() -> None:
    async def story() -> None:
        told = Told(LATE)
        told.telling.hears("admit", wire.WorkerMessage(admit=wire.Admit(name=name(1), held_tokens=64)))
        assert await told.tells(admitted(2)) == []
        assert await told.tells(admitted(1)) == [["admitted", "admitted"]]
        assert await told.tells(admitted(1)) == [], "noted once"
        told.telling.hears("admit", wire.WorkerMessage(admit=wire.Admit(name=name(3), held_tokens=64)))
        failed = wire.WorkerEvent(failed=wire.Failed(name=name(3)))
        assert await told.tells(failed) == [["admitted", "failed"]]
        assert not told.telling._waits, "it is not admitted any more"
        await told.end()

    asyncio.run(story())


def begun(number: int) -> wire.WorkerEvent:
    return wire.WorkerEvent(begun=wire.Begun(name=name(number)))


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine has no use for comes with what is next, and not before, however loaded the host is."""
    monkeypatch.setattr("kvferry.daemon.services.worker_events.UNAWAITED_SECONDS", 60.0)


@pytest.mark.usefixtures("never")
def test_an_engine_with_blocks_hears_what_it_has_no_use_for_with_what_is_next() -> None:
    async def story() -> None:
        told = Told(LATE / 10, in_blocks=True)
        said = told.telling.hears
        # a load: of no use is Admitted, but where what it holds is to be told of behind it, and Ended
        said("admit", wire.WorkerMessage(admit=wire.Admit(name=name(1), tokens=96, held_tokens=64)))
        said("admit", wire.WorkerMessage(admit=wire.Admit(name=name(2), tokens=96, held_tokens=64, held_blocks=[7])))
        assert await told.tells(admitted(1), within=LATE) == []
        assert await told.tells(admitted(2)) == [["admitted", "admitted"]]
        assert await told.tells(ready(1)) == [["ready"]]
        assert await told.tells(ended(1), within=LATE) == []
        # a prompt handed in, and one that is given up: their blocks come back
        said("admit", wire.WorkerMessage(admit=wire.Admit(name=name(3), tokens=64, held_tokens=64)))
        assert await told.tells(ended(3), within=5 * LATE) == [["ended", "ended"]]
        said("abort", wire.WorkerMessage(abort=wire.Abort(name=name(2))))
        assert await told.tells(ended(2), within=5 * LATE) == [["ended"]]
        # a prompt to be sent: of no use is Begun, where nothing is waited for
        said("begin", wire.WorkerMessage(begin=wire.Begin(name=name(4), patience=wire.PATIENCE_NONE)))
        said("begin", wire.WorkerMessage(begin=wire.Begin(name=name(5))))
        assert await told.tells(begun(4), within=LATE) == []
        assert await told.tells(begun(5)) == [["begun", "begun"]]
        assert await told.tells(ended(4), within=5 * LATE) == [["ended"]]
        assert not (told.telling._waits or told.telling._unawaited)
        await told.end()

    asyncio.run(story())


@pytest.mark.usefixtures("never")
def test_the_end_of_a_try_gives_its_blocks_back_whatever_the_next_one_is() -> None:
    async def story() -> None:
        told = Told(LATE / 10, in_blocks=True)
        again = common_pb2.RequestName(request_id=name(1).request_id, attempt=2)
        told.telling.hears("admit", wire.WorkerMessage(admit=wire.Admit(name=name(1), tokens=96)))
        told.telling.hears("abort", wire.WorkerMessage(abort=wire.Abort(name=name(1))))
        told.telling.hears("admit", wire.WorkerMessage(admit=wire.Admit(name=again, tokens=96)))
        assert await told.tells(ended(1), within=5 * LATE) == [["ended"]]
        await told.end()

    asyncio.run(story())


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_of_an_engine_hears_the_same_late(rank: int) -> None:
    async def story() -> None:
        told = Told(LATE / 10, in_blocks=True)
        admit = wire.Admit(name=name(1), tokens=96, held_tokens=64)
        begin = wire.Begin(name=name(2), tokens=96, patience=wire.PATIENCE_NONE)
        for message in (wire.WorkerMessage(admit=admit), wire.WorkerMessage(begin=begin)):
            own = OneRank(rank, 2, "engine", common_pb2.ROLE_DECODE).opening(message)
            told.telling.hears(str(own.WhichOneof("kind")), own)
        assert await told.tells(admitted(1), begun(2), ended(1), within=LATE) == []
        assert await told.tells(ready(3)) == [["admitted", "begun", "ended", "ready"]]
        await told.end()

    asyncio.run(story())


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_that_is_to_say_what_it_holds_hears_at_once(rank: int) -> None:
    async def story() -> None:
        told = Told(LATE / 10, in_blocks=True)
        admit = wire.Admit(name=name(1), tokens=96, held_tokens=64, held_blocks=[7, 8])
        own = OneRank(rank, 2, "engine", common_pb2.ROLE_DECODE).opening(wire.WorkerMessage(admit=admit))
        told.telling.hears("admit", own)
        assert await told.tells(admitted(1)) == [["admitted"]]
        await told.end()

    asyncio.run(story())


def test_nothing_is_late_for_who_did_not_ask_for_it() -> None:
    async def story() -> None:
        told = Told(0.0, in_blocks=True)
        told.telling.hears("admit", wire.WorkerMessage(admit=wire.Admit(name=name(1), tokens=96)))
        assert await told.tells(admitted(1)) == [["admitted"]]
        assert await told.tells(ended(1)) == [["ended"]]
        await told.end()

    asyncio.run(story())


@pytest.mark.parametrize("late_seconds", [0.0, 10.0])
def test_so_many_wait_together(late_seconds: float) -> None:
    async def story() -> None:
        told = Told(late_seconds)
        words = await told.tells(*map(ended, range(2 * MOST_LATE)), within=0.2)
        each = MOST_LATE if late_seconds else 1
        assert [len(word) for word in words] == [each] * (2 * MOST_LATE // each)
        await told.end()

    asyncio.run(story())


def test_nothing_is_lost_between_a_wait_and_its_end() -> None:
    """Events that come at any time beside the end of a wait."""

    async def story() -> None:
        told = Told(0.001)
        for number in range(300):
            told.events.put_nowait(ended(number))
            await asyncio.sleep(0.0005 + number % 7 * 0.0002)
        words = await told.tells(within=0.05)
        assert sum(map(len, words)) == 300
        await told.end()

    asyncio.run(story())


def failed(number: int) -> wire.WorkerEvent:
    return wire.WorkerEvent(failed=wire.Failed(name=name(number)))


@pytest.mark.parametrize("late", [0.0, LATE])
@pytest.mark.parametrize(
    ("admit", "words"),
    [
        (wire.Admit(prefill="p", tokens=64), ["ready"]),
        (wire.Admit(tokens=64), ["admitted", "ready"]),
        (wire.Admit(tokens=64, held_tokens=64), ["ended"]),
    ],
)
def test_of_a_request_that_ends_itself_no_more_is_told_than_its_worker_needs(
    late: float, admit: wire.Admit, words: list[str]
) -> None:
    async def story() -> None:
        told = Told(late, in_blocks=True)
        admit.ends_itself = True
        admit.name.CopyFrom(name(1))
        told.telling.hears("admit", wire.WorkerMessage(admit=admit))
        events = [admitted(1), ready(1), *([ended(1)] if "ended" in words else [])]  # of others Ready is the end
        heard = await told.tells(*events, within=2 * late + 0.05)
        assert [word for words in heard for word in words] == words
        assert not (told.telling._unwanted or told.telling._unawaited or told.telling._waits)
        heard = await told.tells(admitted(1), ready(1), ended(1), within=2 * late + 0.05)
        assert [word for words in heard for word in words] == ["admitted", "ready", "ended"], "the next one of its name"
        await told.end()

    asyncio.run(story())


@pytest.mark.parametrize(("prefill", "held", "words"), [("p", 0, ["ready", "ended"]), ("", 64, ["ended"])])
def test_who_aborts_a_request_that_ends_itself_hears_its_end(prefill: str, held: int, words: list[str]) -> None:
    """What was said meanwhile says nothing of blocks that are handed in: they are being read."""

    async def story() -> None:
        told = Told(0.0, in_blocks=True)
        for number in (1, 2, 3):
            admit = wire.Admit(name=name(number), prefill=prefill, tokens=64, held_tokens=held, ends_itself=True)
            told.telling.hears("admit", wire.WorkerMessage(admit=admit))
        for number in (1, 2):
            told.telling.hears("abort", wire.WorkerMessage(abort=wire.Abort(name=name(number))))
        heard = await told.tells(admitted(1), ready(1), ended(1), within=0.05)
        assert [word for words in heard for word in words] == words
        assert await told.tells(ended(2)) == [["ended"]]
        assert await told.tells(failed(3)) == [["failed"]] and not told.telling._unwanted
        await told.end()

    asyncio.run(story())
