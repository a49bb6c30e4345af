"""`kvferry top`: several daemons at a glance, live: hit rate, pools, transfers, peers, since the frame before."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.channels import ChannelError, add_tls_arguments, open_channel, tls_of
from kvferry.daemon.config import ConfigError, parse_address
from kvferry.daemon.find_daemon import NoDaemon, default_socket
from kvferry.daemon.stats_main import fetch, size
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common

MAX_DAEMONS = 64
BAR = 24  # columns
POOL_PARTS = (  # of a bar: what is in use, cached, free
    ("leased", "█", "red"),
    ("arriving", "▓", "yellow"),
    ("orphaned", "▓", "magenta"),
    ("spilling", "▒", "blue"),
    ("restoring", "▒", "cyan"),
    ("cached", "▒", "green"),
)


@dataclass(frozen=True, slots=True)
class Shot:
    """One daemon at one moment: its statistics, or why there are none."""

    address: str
    at: float
    stats: cache.StatsReply | None
    error: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "addresses", nargs="*", metavar="ADDRESS", help="HOST:PORT or unix:PATH (default: the daemon of this machine)"
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="default: %(default)s")
    add_tls_arguments(parser)
    parser.add_argument("--frames", type=int, default=0, metavar="N", help="end after N (default: until interrupted)")


def run(args: argparse.Namespace) -> int:
    try:
        addresses, tls = _addresses(args), tls_of(args)
        channels = {address: open_channel(address, tls) for address in addresses}
    except (ConfigError, NoDaemon, ChannelError) as error:
        print(f"kvferry top: {error}", file=sys.stderr)
        return 2
    console = Console()
    try:
        with ThreadPoolExecutor(len(channels), thread_name_prefix="top") as pool:
            shots = list(pool.map(_shoot, channels.items()))
            if args.frames == 1:
                console.print(frame(shots, shots))
                return 0 if any(shot.stats for shot in shots) else 1
            live_on = console.is_terminal
            with Live(frame(shots, shots), console=console, auto_refresh=False, screen=live_on) as live:
                shown = 1
                while args.frames == 0 or shown < args.frames:
                    time.sleep(args.interval)
                    before, shots = shots, list(pool.map(_shoot, channels.items()))
                    live.update(frame(before, shots), refresh=True)
                    shown += 1
        return 0 if any(shot.stats for shot in shots) else 1
    except KeyboardInterrupt:
        return 0
    finally:
        for channel in channels.values():
            channel.close()


def _addresses(args: argparse.Namespace) -> list[str]:
    if not 0.1 <= args.interval <= 3600:
        raise ConfigError(f"--interval is {args.interval}; it must be 0.1 to 3600")
    if not 0 <= args.frames <= 1 << 30:
        raise ConfigError(f"--frames is {args.frames}; it must not be negative")
    if len(args.addresses) > MAX_DAEMONS:
        raise ConfigError(f"{len(args.addresses)} addresses are given; at most {MAX_DAEMONS} can be shown")
    for address in args.addresses:
        if not address.startswith("unix:"):
            parse_address(address)
    return list(dict.fromkeys(args.addresses)) or [f"unix:{default_socket(None)}"]


def _shoot(entry: tuple[str, grpc.Channel]) -> Shot:
    address, channel = entry
    try:
        return Shot(address, time.monotonic(), fetch(channel))
    except grpc.RpcError as error:
        return Shot(address, time.monotonic(), None, f"{error.code().name}: {error.details()}")


def frame(before: Sequence[Shot], now: Sequence[Shot]) -> Group:
    """Rates are of the time between the two; of one shot twice, over the daemon's life."""
    table = Table(title=f"kvferry top  {time.strftime('%H:%M:%S')}", title_justify="left", expand=False)
    for column, justify in (
        ("daemon", "left"),
        ("hit rate", "right"),
        ("run/wait", "right"),
        ("pool", "left"),
        ("host", "left"),
        ("moved/s", "right"),
        ("saved/s", "right"),
        ("transfers", "right"),
        ("ready p50/p99", "right"),
        ("peers", "left"),
    ):
        table.add_column(column, justify="right" if justify == "right" else "left", no_wrap=column != "peers")
    for earlier, shot in zip(before, now, strict=True):
        if shot.stats is None:
            table.add_row(f"[bold red]{shot.address}[/]", *[""] * 8, f"[red]{shot.error}[/]")
            continue
        for index, side in enumerate(shot.stats.sides):
            old = _same_side(earlier, shot, index)
            seconds = shot.at - earlier.at if old is not None else shot.stats.uptime_seconds
            table.add_row(*_row(shot.stats, side, old or cache.SideStats(), max(seconds, 1e-3)))
    legend = Text("pool: ")
    for name, mark, style in POOL_PARTS:
        legend.append(mark, style).append(f" {name}  ")
    return Group(table, legend.append("· free"))


def _same_side(earlier: Shot, shot: Shot, index: int) -> cache.SideStats | None:
    """None where there is nothing to compare with: the same shot, or the daemon was started anew."""
    if earlier is shot or earlier.stats is None or shot.stats is None:
        return None
    if earlier.stats.uptime_seconds > shot.stats.uptime_seconds:
        return None
    return earlier.stats.sides[index]


def _row(stats: cache.StatsReply, side: cache.SideStats, old: cache.SideStats, seconds: float) -> list[str | Text]:
    role = common.Role.Name(side.role).removeprefix("ROLE_").lower()
    requests, transfers = side.requests, side.transfers
    queried = requests.queried_tokens - old.requests.queried_tokens
    hit = requests.hit_tokens - old.requests.hit_tokens
    moved = transfers.delta_bytes - old.transfers.delta_bytes
    saved = transfers.saved_bytes - old.transfers.saved_bytes
    ended = f"{transfers.active} / {transfers.completed - old.transfers.completed}"
    failed = transfers.failed - old.transfers.failed
    latency = side.admit_to_ready
    return [
        f"{stats.daemon} ({role})",
        f"{hit / queried:.1%}" if queried else "-",
        f"{requests.running}/{requests.waiting}",
        _bar(side.pool),
        _bar(side.host) if side.host.pages else "-",
        size(moved / seconds),
        size(saved / seconds) if role == "decode" else "-",
        ended + (f" / [red]{failed} failed[/]" if failed else ""),
        f"{latency.p50_ms:.0f}/{latency.p99_ms:.0f} ms" if role == "decode" and latency.count else "-",
        _peers(side),
    ]


def _bar(pool: cache.PoolStats) -> Text:
    if not pool.pages:
        return Text("no worker yet", "dim")
    bar = Text()
    used = 0
    for name, mark, style in POOL_PARTS:
        pages = getattr(pool, name)
        columns = min(BAR - used, -(-pages * BAR // pool.pages) if pages else 0)
        bar.append(mark * columns, style)
        used += columns
    return bar.append("·" * (BAR - used), "dim").append(f" {1 - pool.free / pool.pages:.0%}")


def _peers(side: cache.SideStats) -> Text:
    text = Text()
    for peer in side.peers:
        style = {"up": "green", "connecting": "yellow"}.get(peer.state, "red")
        text.append(f"{peer.name} {peer.state} {peer.free_credits}/{peer.slots}  ", style)
    return text
