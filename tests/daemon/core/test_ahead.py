"""Prompts of an engine with blocks of its own, which waits for no Begun: what it says before there are pages counts."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.effects import BindPages, FailAsk, OpenSend, SendAux, SendProgress, ZeroTail
from kvferry.daemon.core.limits import Name
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from tests.daemon.core.test_stows import SHAPE, TAIL, TOKENS, A, B, Prefill
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, digests, name

OTHERS = [name(number) for number in range(10, 16)]


class Ahead(Prefill):
    """Prompts that nobody asks for have half of all pages: the next one waits until it is asked for."""

    def __init__(self) -> None:
        super().__init__(host_pages=0)
        for each in OTHERS:
            self.begin(each)
            assert self.told("begun")
        self.begin(A)
        assert not self.told("begun") and self.core.waiting_requests == 1

    def begin(self, number: Name, patience: wire.Patience = wire.PATIENCE_NONE) -> None:
        begin = wire.Begin(
            name=number.to_proto(), digests=digests("x", 2), tokens=TOKENS, tail_digest=TAIL, patience=patience
        )
        self.core.begin(1, NAMESPACE, number, begin, DEADLINE, 0.0, SHAPE.of_begin(begin))
        self.take()

    def progress(self, tokens: int, *blocks: int) -> None:
        self.core.progress(1, A, tokens, 0.0, blocks)
        self.take()

    def failure(self) -> common.Error:
        (event,) = self.told("failed")
        return event.failed.error


@pytest.fixture
def side() -> Ahead:
    return Ahead()


def test_what_is_computed_before_there_are_pages_is_sent_from_them(side: Ahead) -> None:
    side.progress(PAGE, 30)
    assert not side.seen
    (sent,) = side.ask(A)
    (begun,) = side.told("begun")
    assert begun.begun.matched_tokens == 0 and sent.pages_ready == 1
    (bound,) = side.of(BindPages)
    assert bound.pages == sent.page_ids and bound.blocks == (30, -1, -1)
    side.progress(TOKENS, 31, 32)
    assert [(each.tokens, each.page) for each in side.of(ZeroTail)] == [(1, sent.page_ids[2])]
    assert [each.pages_ready for each in side.of(SendProgress)] == [3]


def test_so_is_a_prompt_that_is_handed_in_whole(side: Ahead) -> None:
    side.progress(PAGE, 30)
    side.progress(TOKENS, 31, 32)
    side.core.aux(1, A, b"first token", 0.0)
    side.take()
    assert not side.seen
    (sent,) = side.ask(A)
    assert sent.pages_ready == 3 and [each.blob for each in side.of(SendAux)] == [b"first token"]
    assert [each.blocks for each in side.of(BindPages)] == [(30, 31, 32)]
    assert [each.tokens for each in side.of(ZeroTail)] == [1]
    side.core.tail_zeroed(A, 0.0)
    side.core.send_completed(7, 1, 0.0)
    side.core.done(7, A, 0.0)
    side.take()
    assert [event.ended.name for event in side.told("ended")] == [A.to_proto()]


@pytest.mark.parametrize(
    ("tokens", "blocks", "why"),
    [
        (TOKENS + 1, (30, 31, 32), f"tokens is {TOKENS + 1}; it must be 0 to {TOKENS}"),
        (2 * PAGE, (30,), f"tokens is {2 * PAGE}; blocks of {PAGE} are named"),
        (PAGE, (40,), "blocks has 40; the engine has blocks 0 to 39"),
    ],
)
def test_what_is_wrong_with_it_is_told_at_once(side: Ahead, tokens: int, blocks: tuple[int, ...], why: str) -> None:
    side.progress(tokens, *blocks)
    assert why in side.failure().message
    assert side.core.waiting_requests == 0


def test_a_last_word_is_the_last(side: Ahead) -> None:
    side.progress(PAGE, 30)
    side.core.aux(1, A, b"", 0.0)
    side.take()
    assert f"aux follows progress to {TOKENS} tokens, not {PAGE}" in side.failure().message
    side.core.abort(1, A, 0.0)
    side.take()
    assert side.told("ended")


def test_behind_it_there_is_none(side: Ahead) -> None:
    side.progress(TOKENS, 30, 31, 32)
    side.core.aux(1, A, b"", 0.0)
    for again in (lambda: side.core.aux(1, A, b"", 0.0), lambda: side.core.progress(1, A, TOKENS, 0.0, ())):
        with pytest.raises(Exception, match="is out of the worker's hands"):
            again()


def test_it_ends_without_pages(side: Ahead) -> None:
    side.progress(TOKENS, 30, 31, 32)
    side.core.aux(1, A, b"", 0.0)
    side.core.tick(DEADLINE)
    side.take()
    assert any(event.failed.name == A.to_proto() for event in side.told("failed"))
    assert not side.of(BindPages), "nobody reads its blocks"
    side.core.abort(1, A, DEADLINE)
    side.take()
    assert any(event.ended.name == A.to_proto() for event in side.told("ended"))


def test_who_waits_for_begun_says_nothing_before(side: Ahead) -> None:
    side.begin(B, wire.PATIENCE_FETCH)
    side.core.progress(1, B, PAGE, 0.0, (33,))
    side.take()
    assert "after Begun" in side.failure().message
    assert not side.of(FailAsk) and not side.of(OpenSend)
