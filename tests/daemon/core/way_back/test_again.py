"""Requests that come again: a prefill core that has kept nothing of them fetches what the decode core has. Each hears
the other's Asks."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.effects import OpenSend, StartFetch, StartTransfer, StopTransfer
from kvferry.daemon.core.errors import unavailable
from kvferry.daemon.core.limits import Name
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES
from tests.daemon.core.test_decode_guards import C, short_of_pages
from tests.daemon.core.way_back.test_fetches import Fetching
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, Decode, digests, name

SESSION = 1
PROMPT = 4  # pages


def fetched(decode: Decode, number: Name, prompt: str, pages: int) -> int:
    """Pages that a prefill core, for which this request was just admitted, fetches from the decode core, all of which
    arrive: its worker is told them."""
    (asked,) = decode.of(StartTransfer)
    assert asked.ask.name == number.to_proto()
    prefill = Fetching()
    prefill.core.ask(SESSION, number, asked.ask, DEADLINE, 0.0)
    begin = wire.Begin(name=number.to_proto(), digests=digests(prompt, pages), tokens=pages * PAGE)
    prefill.core.begin(1, NAMESPACE, number, begin, DEADLINE, 0.0)
    prefill.take()
    (fetch,) = prefill.of(StartFetch)
    decode.core.returns.asked(SESSION, asked.prefill, number, fetch.ask, 0.0)
    decode.take()
    (send,) = decode.of(OpenSend)
    assert (send.first_page, len(send.page_ids), send.pages_ready) == (0, fetch.ask.pages, fetch.ask.pages)
    assert send.page_ids == tuple(decode.core.leases[number].pages[: fetch.ask.pages])
    prefill.step("arrived", 1, list(range(fetch.ask.pages)))
    prefill.step("completed", 1)
    decode.core.returns.over(SESSION, fetch.ask.transfer, 0.0, completed=True)
    assert prefill.matched() == fetch.ask.pages
    return fetch.ask.pages


@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_a_new_attempt_fetches_what_the_last_one_brought(how: str) -> None:
    first, second = name(1), name(1, 2)
    decode = Decode(16)
    decode.admit(first, "x", PROMPT)
    (asked,) = decode.of(StartTransfer)
    decode.arrive(asked.ask.transfer, [0, 1, 3])  # what lies behind a gap is nobody's
    if how == "failed":
        decode.core.prefill_down("p", unavailable("the session ended"), 0.0)
        decode.take()
        assert decode.told("failed")
    decode.core.abort(1, first, 0.0)
    decode.core.transfer_drained(asked.ask.transfer, 0.0)
    decode.take()
    assert first not in decode.core.leases and decode.told("ended")
    decode.admit(second, "x", PROMPT, prefill="q")
    assert fetched(decode, second, "x", PROMPT) == 2


def test_a_new_attempt_fetches_beside_an_old_one_that_drains() -> None:
    """The old one's lease is still there under its own name."""
    first, second = name(1), name(1, 2)
    decode = Decode(16)
    decode.admit(first, "x", PROMPT)
    (asked,) = decode.of(StartTransfer)
    decode.arrive(asked.ask.transfer, [0])
    decode.core.abort(1, first, 0.0)
    decode.take()
    assert decode.of(StopTransfer) and first in decode.core.leases
    decode.admit(second, "x", PROMPT, prefill="q")
    assert fetched(decode, second, "x", PROMPT) == 1


def test_a_request_that_is_continued_fetches_its_output_too() -> None:
    """What it generated was never at a prefill daemon."""
    first, longer = name(1), name(2)
    decode = Decode(16)
    decode.admit(first, "x", PROMPT, new=2 * PAGE)
    (asked,) = decode.of(StartTransfer)
    decode.arrive(asked.ask.transfer, range(PROMPT))
    decode.core.aux("p", first, b"first token", 0.0)
    decode.core.transfer_completed(asked.ask.transfer, 0.0)
    decode.core.grow(1, first, (PROMPT + 1) * PAGE, 0.0)
    output = digests("x", PROMPT + 1)[PROMPT * DIGEST_BYTES :]
    decode.core.finish(1, first, (PROMPT + 1) * PAGE, output, 0.0)
    decode.take()
    assert first not in decode.core.leases
    decode.admit(longer, "x", PROMPT + 2)
    assert fetched(decode, longer, "x", PROMPT + 2) == PROMPT + 1


def test_a_request_that_was_retracted_fetches_as_any_other() -> None:
    decode = short_of_pages()
    decode.core.abort(1, name(1), 0.0)
    decode.core.finish(3, C, 2 * PAGE, b"", 0.0, continues=True)
    decode.take()
    assert decode.core.comes_back(3, C) and C not in decode.core.leases
    decode.admit(C, "z", 3, worker=3)
    assert fetched(decode, C, "z", 3) == 2
