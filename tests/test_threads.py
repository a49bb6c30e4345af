"""A thread that makes calls for others."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

import pytest

from kvferry.threads import CallThread

SECONDS = 10.0


def test_calls_are_made_in_their_order_on_the_thread_that_has_the_name() -> None:
    thread, made = CallThread("in order"), list[tuple[int, str]]()
    for number in range(100):
        thread.submit(partial(lambda each: made.append((each, threading.current_thread().name)), number))
    assert thread.flush(SECONDS)
    assert made == [(number, "in order") for number in range(100)]
    assert thread.close(SECONDS)


def test_a_call_that_fails_is_logged_and_the_next_is_made(caplog: pytest.LogCaptureFixture) -> None:
    thread = CallThread("goes on")
    with caplog.at_level(logging.ERROR):
        thread.submit(lambda: 1 // 0)
        assert thread.flush(SECONDS)
    assert "a call of goes on" in caplog.text and "ZeroDivisionError" in caplog.text
    assert thread.close(SECONDS)


def test_it_ends_behind_what_it_was_given_and_takes_nothing_more() -> None:
    thread, gate, made = CallThread("ends"), threading.Event(), threading.Event()
    thread.submit(partial(gate.wait, SECONDS))
    thread.submit(made.set)
    began = time.monotonic()
    assert not thread.flush(0.05) and not thread.close(0.05)
    assert time.monotonic() - began < SECONDS / 2
    with pytest.raises(RuntimeError, match="ends is closed"):
        thread.submit(made.set)
    assert not made.is_set()
    gate.set()
    assert thread.close(SECONDS) and made.is_set()
    assert thread.close(SECONDS), "again"
