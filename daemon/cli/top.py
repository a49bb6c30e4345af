"""`kvferry top`: several daemons at a glance, live: hit rate, pools, transfers, peers, since the frame before."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from rich.console import Console, Group
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvferry.channels import ChannelError, add_tls_arguments, open_channel, tls_of
from kvferry.daemon.cli.find_daemon import ADDRESS_HELP, default_address
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.config.values import ConfigError, parse_address, size
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common

MAX_DAEMONS = 64
BAR = 24  # columns
NATURAL = 1000  # columns where the output is no terminal: nothing is cut or folded
POOL_PARTS = (  # of a bar: what is in use, cached, free. Each can be told without its colour
    ("leased", "█", "red"),
    ("arriving", "▓", "yellow"),
    ("orphaned", "x", "magenta"),
    ("spilling", "↓", "blue"),
    ("restoring", "↑", "cyan"),
    ("cached", "▒", "green"),
)
COLUMNS = (
    "daemon",
    "hit rate",
    "run/wait",
    "pool",
    "host",
    "moved/s",
    "saved/s",
    "transfers",
    "ready p50/p99",
    "peers",
)
DROPPED = ("saved/s", "host", "ready p50/p99", "peers", "transfers")  # where the terminal is narrow, in this order
LEFT = ("daemon", "pool", "host", "peers")
Row = list[str | Text]  # a value for each of COLUMNS
Draw = Callable[[cache.PoolStats], Text]


@dataclass(frozen=True, slots=True)
class Shot:
    """One daemon at one moment: its statistics, or why there are none."""

    address: str
    at: float
    stats: cache.StatsReply | None
    error: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "addresses", nargs="*", metavar="ADDRESS", help=f"HOST:PORT or unix:PATH (default: {ADDRESS_HELP})"
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="default: %(default)s")
    add_tls_arguments(parser)
    parser.add_argument("--frames", type=int, default=0, metavar="N", help="end after N (default: until interrupted)")


def run(args: argparse.Namespace) -> int:
    try:
        addresses, tls = _addresses(args), tls_of(args)
        channels = {address: open_channel(address, tls) for address in addresses}
    except (ConfigError, ChannelError) as error:
        print(f"kvferry top: {error}", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=NATURAL)
    try:
        with ThreadPoolExecutor(len(channels), thread_name_prefix="top") as pool:
            shots = list(pool.map(_shoot, channels.items()))
            if args.frames == 1:
                console.print(frame(shots, shots, console))
                return 0 if any(shot.stats for shot in shots) else 2
            live_on = console.is_terminal
            with Live(frame(shots, shots, console), console=console, auto_refresh=False, screen=live_on) as live:
                shown = 1
                while args.frames == 0 or shown < args.frames:
                    time.sleep(args.interval)
                    before, shots = shots, list(pool.map(_shoot, channels.items()))
                    live.update(frame(before, shots, console), refresh=True)
                    shown += 1
        return 0 if any(shot.stats for shot in shots) else 2
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
    return list(dict.fromkeys(args.addresses)) or [default_address()]


def _shoot(entry: tuple[str, grpc.Channel]) -> Shot:
    address, channel = entry
    try:
        return Shot(address, time.monotonic(), fetch(channel))
    except grpc.RpcError as error:
        return Shot(address, time.monotonic(), None, f"{error.code().name}: {error.details()}")


def frame(before: Sequence[Shot], now: Sequence[Shot], console: Console) -> Group:
    """A frame as wide as the console at most: a table with bars, else with shares in their place and as many columns
    as fit, else a list for each daemon. Rates are of the time between the two; of one shot twice, over the daemon's
    life.
    """
    errors = [Text(f"{shot.address}: {shot.error}", "bold red") for shot in now if shot.stats is None]
    title = f"kvferry top  {time.strftime('%H:%M:%S')}"
    table = _table(title, COLUMNS, list(_rows(before, now, _bar)))
    if _fits(table, console):
        legend = Text("pool: ")
        for name, mark, style in POOL_PARTS:
            legend.append(mark, style).append(f" {name}  ")
        return Group(table, *errors, legend.append("· free"))
    rows = list(_rows(before, now, _share))
    for count in range(len(DROPPED) + 1):
        dropped = DROPPED[:count]
        table = _table(title, [column for column in COLUMNS if column not in dropped], rows)
        if _fits(table, console):
            more = [Text(f"not shown, the terminal is narrow: {', '.join(dropped)}", "dim")] if dropped else []
            return Group(table, *errors, *more)
    return Group(title, *map(_list, rows), *errors)


def _fits(table: Table, console: Console) -> bool:
    return Measurement.get(console, console.options.update(max_width=NATURAL), table).maximum <= console.width


def _table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", expand=False)
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[COLUMNS.index(column)] for column in columns))
    return table


def _list(row: Row) -> Group:
    """A line for each column: of a terminal too narrow for them side by side."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for column, value in zip(COLUMNS[1:], row[1:], strict=True):
        grid.add_row(f"  {column}", value)
    return Group(Text(str(row[0]), "bold"), grid)


def _rows(before: Sequence[Shot], now: Sequence[Shot], draw: Draw) -> Iterator[Row]:
    """One for each side of each daemon that answered."""
    for earlier, shot in zip(before, now, strict=True):
        for index, side in enumerate(shot.stats.sides if shot.stats is not None else ()):
            assert shot.stats is not None
            old = _same_side(earlier, shot, index)
            seconds = shot.at - earlier.at if old is not None else shot.stats.uptime_seconds
            yield _row(shot.stats, side, old or cache.SideStats(), max(seconds, 1e-3), draw)


def _same_side(earlier: Shot, shot: Shot, index: int) -> cache.SideStats | None:
    """None where there is nothing to compare with: the same shot, or the daemon was started anew."""
    if earlier is shot or earlier.stats is None or shot.stats is None:
        return None
    if earlier.stats.uptime_seconds > shot.stats.uptime_seconds:
        return None
    return earlier.stats.sides[index]


def _host(side: cache.SideStats, old: cache.SideStats, draw: Draw) -> str | Text:
    host = side.host
    if not host.asked_pages:
        return "-"
    unstored = sum(each.count for each in side.tiers.unstored) - sum(each.count for each in old.tiers.unstored)
    there = draw(host) if host.pages == host.asked_pages else Text(f"{host.pages / host.asked_pages:.0%} is there")
    return there.append(f", {unstored} not stored" if unstored else "", "yellow")


def _row(stats: cache.StatsReply, side: cache.SideStats, old: cache.SideStats, seconds: float, draw: Draw) -> Row:
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
        draw(side.pool),
        _host(side, old, draw),
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


def _share(pool: cache.PoolStats) -> Text:
    """The share of the pool that is not free."""
    return Text(f"{1 - pool.free / pool.pages:.0%}" if pool.pages else "no worker yet")


def _peers(side: cache.SideStats) -> Text:
    text = Text()
    for peer in side.peers:
        style = {"up": "green", "down": "red"}.get(peer.state, "yellow")
        credits = f" {peer.free_credits}/{peer.slots}" if peer.slots else ""
        text.append(f"{peer.name} {peer.state}{credits}  ", style)
    return text
