"""A decode core that sends back out of blocks of an engine's: what it promises of them, when it reads them, and until
when they are nobody else's."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.effects import BindPages, EndSend, FailAsk, OpenSend, SendProgress, StartTransfer
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.lease import LeaseState
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES
from tests.daemon.core.test_block_guards import PER_PAGE, SHAPE, A, B, Decode, blocks_of
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, digests

SESSION, PAGES, HELD = 7, 4, 2
OURS, THEIRS = blocks_of(0, HELD), blocks_of(20, PAGES)  # the engine's own, and those to be written


class Blocks(Decode):
    """A holds two of four pages in blocks 0 to 3."""

    def admit_held(self, held: int = HELD, *, start: int = -1, named: bool = True, first: int = 20) -> None:
        """`start`: tokens before the first block that is to be written; where it is not said, those that are held."""
        start = held * PAGE if start < 0 else start
        request = wire.Admit(
            name=A.to_proto(),
            digests=digests("x", PAGES),
            tokens=PAGES * PAGE,
            prefill="p",
            max_new_tokens=1,
            held_tokens=held * PAGE,
            blocks=blocks_of(first, PAGES)[start // SHAPE.block_tokens :],
            blocks_from=start,
            held_blocks=blocks_of(0, held) if named else (),
        )
        self.core.admit(1, NAMESPACE, A, request, DEADLINE, 0.0, SHAPE.named_by(request))
        self.take()

    def back(self, pages: int = HELD, number: int = 1) -> None:
        ask = peer.Ask(
            transfer=number,
            name=A.to_proto(),
            namespace_id=NAMESPACE,
            pages=pages,
            tokens=PAGES * PAGE,
            last_full_digest=digests("x", PAGES)[-DIGEST_BYTES:],
        )
        self.core.returns.asked(SESSION, "p", A, ask, 0.0)
        self.take()

    def progress(self, tokens: int = HELD * PAGE) -> None:
        self.core.filled(1, A, tokens, 0.0)
        self.take()

    def all_comes(self) -> None:
        """What prefill sends, and the first token."""
        (number,) = self.core.leases[A].transfers
        self.core.pages_arrived(number, range(HELD, PAGES), 0.0)
        self.core.transfer_completed(number, 0.0)
        self.core.aux("p", A, b"7", 0.0)
        self.take()

    def over(self, number: int = 1) -> None:
        self.core.returns.over(SESSION, number, 0.0, completed=False)
        self.take()

    @property
    def promised(self) -> int:
        """Pages, of the Ask of the last step."""
        return self.of(StartTransfer)[-1].ask.held_tokens // PAGE


def test_what_is_named_is_promised_and_bound() -> None:
    side = Blocks()
    side.admit_held()
    assert side.promised == HELD
    (bound,) = side.of(BindPages)
    assert bound.blocks == (*OURS, *THEIRS[HELD * PER_PAGE :])
    assert bound.pages == tuple(side.core.leases[A].pages)


def test_what_is_not_named_is_not_promised() -> None:
    side = Blocks()
    side.stored(3)
    side.admit_held(named=False)
    assert side.promised == 0, "nor is what lies behind a gap"
    (bound,) = side.of(BindPages)
    assert bound.blocks[: HELD * PER_PAGE] == (-1,) * (HELD * PER_PAGE)


def test_nothing_is_read_before_its_engine_has_said_that_it_is_computed() -> None:
    side = Blocks()
    side.admit_held()
    side.back()
    (send,) = side.of(OpenSend)
    assert (send.pages_ready, send.page_ids) == (0, tuple(side.core.leases[A].pages[:HELD]))
    side.progress()
    (progress,) = side.of(SendProgress)
    assert progress.pages_ready == HELD


def test_what_is_asked_back_behind_that_is_read_at_once() -> None:
    side = Blocks()
    side.admit_held()
    side.progress()
    side.back(pages=1)
    (send,) = side.of(OpenSend)
    assert send.pages_ready == 1


def test_an_engine_says_it_once() -> None:
    side = Blocks()
    side.admit_held()
    side.progress()
    side.progress()
    assert side.told("failed")


def test_what_the_engine_says_beside_ready_harms_nothing() -> None:
    side = Blocks()
    side.admit_held()
    side.all_comes()
    assert side.told("ready")
    side.progress()
    assert not side.told("failed") and side.core.leases[A].state is LeaseState.READY


@pytest.mark.parametrize("held", [0, HELD])
def test_what_the_host_tier_restores_behind_it_follows(held: int) -> None:
    side = Blocks()
    side.stored(3)
    side.admit_held(held)
    (load,) = side.copies()
    assert side.promised == 3
    side.back(pages=3)
    if held:
        side.progress()
        (progress,) = side.of(SendProgress)
        assert progress.pages_ready == HELD
    side.end(load)
    (progress,) = side.of(SendProgress)
    assert progress.pages_ready == 3


def test_a_page_of_which_the_engine_holds_a_part_does_not_go_back() -> None:
    """The daemon knows the blocks of the rest of it alone."""
    side = Blocks()
    side.stored(3)
    side.admit_held(start=HELD * PAGE + SHAPE.block_tokens)
    assert side.promised == HELD


def test_a_restore_that_fails_ends_the_fetch() -> None:
    side = Blocks()
    side.stored(4)
    side.admit_held()
    (load,) = side.copies()
    assert side.promised == 4
    side.progress()
    side.back(pages=4)
    side.end(load, load.copy.device[0])
    (failed,), ends = side.of(FailAsk), side.of(EndSend)
    assert failed.error.code == common.ERROR_UNAVAILABLE and len(ends) == 1
    assert side.promised == HELD, "prefill is asked for it"


def test_ready_waits_until_nothing_is_read() -> None:
    """From then on the engine may write its blocks, as soon as its request is over."""
    side = Blocks()
    side.admit_held()
    side.progress()
    side.back()
    side.all_comes()
    (end,) = side.of(EndSend)
    assert not side.told("ready") and end.transfer == 1
    side.over()
    assert side.told("ready") and side.core.leases[A].state is LeaseState.READY
    side.back(number=2)
    assert side.of(FailAsk) and not side.of(OpenSend)


def test_ready_comes_when_the_session_is_over_too() -> None:
    side = Blocks()
    side.admit_held()
    side.progress()
    side.back()
    side.all_comes()
    side.core.returns.session_down(SESSION, 0.0)
    side.take()
    assert side.told("ready")


@pytest.mark.parametrize("how", ["abort", "fail", "worker", "late"])
def test_a_request_has_not_ended_while_its_blocks_are_read(how: str) -> None:
    side = Blocks()
    side.admit_held()
    side.progress()
    side.back()
    if how == "abort":
        side.core.abort(1, A, 0.0)
    elif how == "fail":
        side.core.prefill_down("p", RequestError(common.ERROR_UNAVAILABLE, "gone"), 0.0)
    elif how == "late":
        side.core.tick(DEADLINE)
    else:
        side.core.worker_lost(1, 0.0)
        side.core.worker_gone(1, 0.0)
    side.take()
    assert len(side.of(EndSend)) == 1
    if how in ("fail", "late"):
        side.core.abort(1, A, 0.0)
    side.core.transfer_drained(1, 0.0)
    side.take()
    assert A in side.core.leases and not side.told("ended")
    with pytest.raises(RequestError, match="blocks has 1, which is another request's that has not ended"):
        side.admit(B, 1, 1)
    side.over()
    assert A not in side.core.leases and (how == "worker" or side.told("ended"))
    side.admit(B, 1, 1)


def test_requests_may_hold_the_same_blocks() -> None:
    side = Blocks()
    side.admit_held()
    (copy,) = side.store(B, HELD, 0)
    assert len(copy.copy.device) == HELD, "what is read may be read for others too"


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("held_blocks has 40; the engine has blocks 0 to 39", {"held_blocks": [0, 1, 2, 40]}),
        ("held_blocks has 1 entries twice", {"held_blocks": [0, 1, 2, 2]}),
        ("held_blocks has 3 entries; with held_tokens 8 it must have 4", {"held_blocks": [0, 1, 2]}),
        ("held_blocks has 20, which blocks has, too: it is written", {"held_blocks": [0, 1, 2, 20]}),
        ("held_blocks has 4 entries; where prefill is empty it must have 0", {"prefill": ""}),
    ],
)
def test_what_may_not_be_named(words: str, fields: dict[str, object]) -> None:
    told = {"tokens": 16, "prefill": "p", "held_tokens": 8, "blocks_from": 8, "blocks": range(20, 24)}
    request = wire.Admit(**{**told, "held_blocks": range(4), **fields})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=words):
        SHAPE.named_by(request)
