"""What a daemon's statistics say of its way back."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from kvferry.daemon.cli.stats import render
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.way_back.choice import FETCH
from kvferry.daemon.observe.stats import side_stats
from kvferry.daemon.peers.handshake import without_effect
from kvferry.proto import cache_pb2 as cache
from tests.simulation.clock import Clock
from tests.simulation.daemons import PLAIN, SimDecode, SimPrefill
from tests.simulation.faults import Faults


def prefill(**settings: Any) -> SimPrefill:
    return SimPrefill(Clock(1), DaemonConfig(role="prefill", name="p", page_size=4, **settings), PLAIN, Faults())


def shown(side: cache.SideStats) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(render(cache.StatsReply(daemon="d", sides=[side])))
    return " ".join(capture.get().split())


def test_the_choices_and_both_estimates_are_shown() -> None:
    side = prefill(way_back="auto")
    fetches = side.ready_core.fetches
    assert fetches.judge.choose(1, 100, 0.0).why == FETCH
    fetches.counters.pages, fetches.counters.payload_bytes, fetches.counters.completed = 100, 4096, 1
    fetches.fetched_tokens = 400
    fetches.counters.abort("too_late")
    back = side_stats(side).way_back
    assert (back.setting, back.off_because, back.fetched_tokens, back.tokens_per_second) == ("auto", "", 400, 10_000)
    assert [(choice.reason, choice.count) for choice in back.choices] == [(FETCH, 1)]
    assert back.compute_seconds == pytest.approx(0.04) and 0 < back.fetch_seconds < 0.04
    assert [(reason.reason, reason.count) for reason in back.transfers.aborts] == [("too_late", 1)]
    text = shown(side_stats(side))
    assert "way back (auto): fetched" in text and "100 pages, 4.0 KiB" in text and "fetched 1" in text
    assert "40.0 / 2.0 ms" in text and "10000 tokens/s" in text


def test_why_it_has_no_effect_is_shown() -> None:
    side = prefill(way_back="auto", reuse="off")
    assert side.ready_core.fetches.judge.limits.setting == "off"
    assert "off, because nothing is kept (reuse is off)" in shown(side_stats(side))
    assert "way back" not in shown(side_stats(prefill()))


def test_what_was_sent_back_is_shown() -> None:
    side = SimDecode(Clock(1), DaemonConfig(role="decode", page_size=4, way_back="always"), PLAIN, Faults())
    side.ready_core.returns.counters.pages = 7
    assert side_stats(side).way_back.transfers.delta_pages == 7
    assert "way back: sent" in shown(side_stats(side)) and "7 pages" in shown(side_stats(side))


def test_the_log_says_where_the_setting_has_no_effect() -> None:
    def told(**settings: Any) -> str:
        return without_effect(DaemonConfig(role="decode", name="d", page_size=4, **settings))

    why = "--way-back is auto and has no effect: nothing is kept (reuse is off)"
    assert told(way_back="auto", reuse="off") == why
    assert told(way_back="auto", pool="engine", ranks=2) == told(way_back="auto") == told(reuse="off") == ""
