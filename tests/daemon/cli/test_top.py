"""`kvferry top`: whatever the terminal's width, no line is cut or broken within a value."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvferry.daemon.cli import top as top_main
from kvferry.daemon.cli.top import Shot, frame
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common

POOL = {"pages": 24, "leased": 1, "arriving": 2, "orphaned": 3, "spilling": 4, "restoring": 5, "cached": 6, "free": 3}


def shots() -> list[Shot]:
    side = cache.SideStats(
        role=common.ROLE_DECODE,
        requests=cache.RequestStats(running=7, waiting=3, queried_tokens=1000, hit_tokens=605),
        pool=cache.PoolStats(**POOL),
        host=cache.PoolStats(pages=24, asked_pages=24, cached=12, free=12),
        transfers=cache.TransferStats(delta_bytes=5 << 20, saved_bytes=3 << 20, completed=25),
        peers=[cache.PeerStats(name="prefill-0", state="up", slots=16, free_credits=16)],
    )
    told = cache.StatsReply(daemon="decode-0", uptime_seconds=1.0, sides=[side])
    return [Shot("127.0.0.1:7070", 1.0, told), Shot("127.0.0.1:1", 1.0, None, "UNAVAILABLE: refused")]


def shown(width: int, now: list[Shot] | None = None, before: list[Shot] | None = None) -> list[str]:
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        now = now or shots()
        console.print(frame(before or now, now, console))
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize(
    ("width", "there", "not_there"),
    [
        (1000, ["decode-0 (decode)", "60.5%", "7/3", "5.0 MiB", "3.0 MiB", "prefill-0 up 16/16", "arriving"], []),
        (130, ["decode-0 (decode)", "60.5%", "7/3", "88%", "50%", "3.0 MiB", "prefill-0 up 16/16"], ["arriving"]),
        (80, ["decode-0 (decode)", "60.5%", "7/3", "88%", "5.0 MiB", "0 / 25"], ["3.0 MiB", "prefill-0"]),
        (40, ["decode-0 (decode)", "60.5%", "7/3", "88%", "3.0 MiB", "prefill-0 up 16/16"], ["│"]),
    ],
)
def test_values_are_whole_at_any_width(width: int, there: list[str], not_there: list[str]) -> None:
    lines = shown(width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "…" not in text and "127.0.0.1:1: UNAVAILABLE: refused" in text
    for value in there:
        assert value in text, (value, text)
    for value in not_there:
        assert value not in text, (value, text)
    assert ("not shown, the terminal is narrow: saved/s, host" in text) == (width == 80)
    if width != 40:  # one row
        row = next(line for line in lines if "decode-0" in line)
        assert all(value in row for value in there if value != "arriving")


def test_states_can_be_told_without_colours() -> None:
    marks = [mark for _, mark, _ in top_main.POOL_PARTS]
    assert len({*marks, "·"}) == len(marks) + 1
    row = next(line for line in shown(1000) if "decode-0" in line)
    assert "█▓▓xxx↓↓↓↓↑↑↑↑↑▒▒▒▒▒▒···" in row


def test_a_host_tier_that_grows_says_how_far_it_is() -> None:
    now = shots()
    assert now[0].stats is not None
    for pages, words in ((6, "25% is there"), (0, "0% is there"), (24, "50%")):
        now[0].stats.sides[0].host.pages = pages
        assert words in "\n".join(shown(1000, now))


@pytest.mark.parametrize(("counts", "said"), [((3, 7), "50%, 4 not stored"), ((7, 7), "50% ")])
def test_pages_that_were_not_stored_since_the_frame_before(counts: tuple[int, int], said: str) -> None:
    before, now = shots(), shots()
    for each, count in zip((before, now), counts, strict=True):
        assert each[0].stats is not None
        each[0].stats.sides[0].tiers.unstored.add(reason="room", count=count)
    assert said in "\n".join(shown(1000, now, before))
