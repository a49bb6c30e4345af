"""`kvferry stats`: a daemon's cache statistics, once or again and again."""

from __future__ import annotations

import argparse
import json
import sys
import time

import grpc
from google.protobuf import json_format
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.channels import ChannelError, add_tls_arguments, open_channel, tls_of
from kvferry.daemon.cli.find_daemon import ADDRESS_HELP, default_address
from kvferry.daemon.config.values import ConfigError, parse_address, size
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common
from kvferry.proto.cache_pb2_grpc import CacheStub

TIMEOUT_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", nargs="?", help=f"HOST:PORT or unix:PATH (default: {ADDRESS_HELP})")
    parser.add_argument("--watch", action="store_true", help="again every --interval seconds until interrupted")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    add_tls_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= 3600:
        print(f"kvferry stats: --interval is {args.interval}; it must be 0.1 to 3600", file=sys.stderr)
        return 2
    address = args.address or default_address()
    try:
        if not address.startswith("unix:"):
            parse_address(address)
        opened = open_channel(address, tls_of(args))
    except (ConfigError, ChannelError) as error:
        print(f"kvferry stats: {error}", file=sys.stderr)
        return 2
    show = _show_json if args.format == "json" else _show_table
    with opened as channel:
        try:
            if args.watch:
                _watch(channel, args.interval, args.format)
            else:
                show(fetch(channel))
        except grpc.RpcError as error:
            print(f"kvferry stats: {address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            pass
    return 0


def fetch(channel: grpc.Channel) -> cache.StatsReply:
    """One snapshot. grpc.RpcError after TIMEOUT_SECONDS."""
    reply: cache.StatsReply = CacheStub(channel).Stats(cache.StatsRequest(), timeout=TIMEOUT_SECONDS)
    return reply


def to_json(reply: cache.StatsReply) -> str:
    """One line, zeros included; 64-bit numbers are strings, as in protobuf's JSON, but bytes are hex digits."""
    found = json_format.MessageToDict(
        reply, always_print_fields_with_no_presence=True, preserving_proto_field_name=True
    )
    for side, told in zip(found["sides"], reply.sides, strict=True):
        for namespace, with_id in zip(side["namespaces"], told.namespaces, strict=True):
            namespace["namespace_id"] = with_id.namespace_id.hex()
    return json.dumps(found)


def _show_json(reply: cache.StatsReply) -> None:
    print(to_json(reply), flush=True)


def _show_table(reply: cache.StatsReply) -> None:
    Console().print(render(reply))


def _watch(channel: grpc.Channel, interval: float, form: str) -> None:
    if form == "json":
        while True:
            _show_json(fetch(channel))
            time.sleep(interval)
    with Live(render(fetch(channel)), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(render(fetch(channel)), refresh=True)


def render(reply: cache.StatsReply) -> Group:
    """A table for each role, and below what is too long for one."""
    metrics = f"metrics: http://{reply.metrics}/metrics" if reply.metrics else "metrics: off"
    errors = [
        Text(f"peer {peer.name} {peer.address}: {_brief(peer)}", "bold red")
        for side in reply.sides
        for peer in side.peers
        if peer.error
    ]
    errors += [Text(f"stands still: {part}", "bold red") for part in reply.stalled]
    errors += [Text(f"no worker can be served: {lack}", "bold red") for lack in reply.lacks]
    return Group(*(_side_table(reply, side) for side in reply.sides), *errors, metrics, *_tls_lines(reply))


def _brief(peer: cache.PeerStats) -> str:
    """The peer's error without its name, and of what gRPC says the last clause."""
    error = peer.error.removeprefix(f"prefill daemon {peer.name!r} at {peer.address} ")
    before, found, grpcs = error.partition(": UNAVAILABLE: failed to connect to all addresses")
    if not found:
        return error
    *others, last = grpcs.split(": ")
    code = others[-1].rpartition(":")[2] if others else ""  # of TLS: CERTIFICATE_VERIFY_FAILED
    return f"{before}: {code}: {last}" if code.isupper() else f"{before}: {last}"


def _tls_lines(reply: cache.StatsReply) -> list[str]:
    if not reply.HasField("tls"):
        return ["tls: off"]
    until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(reply.tls.expires))
    return [f"tls: certificate until {until}", *([f"tls: {reply.tls.broken}"] if reply.tls.broken else [])]


def _side_table(reply: cache.StatsReply, side: cache.SideStats) -> Table:
    role = common.Role.Name(side.role).removeprefix("ROLE_").lower()
    table = Table(title=f"{reply.daemon} ({role}), up {reply.uptime_seconds:.0f} s", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    requests, pool, transfers = side.requests, side.pool, side.transfers
    rows: list[tuple[str, str]] = [
        ("requests running / waiting", f"{requests.running} / {requests.waiting}"),
        (
            "finished / aborted / failed / refused",
            f"{requests.finished} / {requests.aborted} / {requests.failed} / {requests.refused}",
        ),
        ("waiting for pages being spilled", f"{requests.reserved}"),
        ("overtaken / retracted", f"{requests.overtaken} / {requests.retracted}"),
        (
            "tokens queried / hit / of them from the host",
            f"{requests.queried_tokens} / {requests.hit_tokens} / {requests.host_hit_tokens}",
        ),
        (
            f"hit rate, lifetime / last {requests.recent_requests}",
            f"{requests.hit_rate:.1%} / {requests.recent_hit_rate:.1%}",
        ),
        ("delta pages " + ("received" if role == "decode" else "sent"), f"{transfers.delta_pages}"),
        ("delta bytes", size(transfers.delta_bytes)),
        ("bytes saved", size(transfers.saved_bytes)),
        (
            "transfers active / completed / failed / aborted",
            f"{transfers.active} / {transfers.completed} / {transfers.failed} / {transfers.aborted}",
        ),
        ("asked again / parts dropped", f"{transfers.asked_again} / {transfers.dropped_parts}"),
        ("pages", f"{pool.pages} x {size(pool.page_bytes)}"),
        ("  free", f"{pool.free}"),
        ("  leased", f"{pool.leased}"),
        ("  arriving", f"{pool.arriving}"),
        ("  cached (evictable)", f"{pool.cached} ({pool.evictable})"),
        ("  spilling / restoring / orphaned", f"{pool.spilling} / {pool.restoring} / {pool.orphaned}"),
        (
            "pages of lost workers / where new work is refused",
            f"{side.quarantine.orphaned_pages} / {side.quarantine.orphaned_bound}",
        ),
        (
            "lost workers / transfers that drain",
            f"{side.quarantine.lost_workers} / {side.quarantine.draining_transfers}",
        ),
        (f"promised / locks / evicted by {side.policy or '-'}", f"{pool.promised} / {pool.locks} / {pool.evicted}"),
    ]
    if pool.block_tokens:
        rows.append(("pages are blocks that the engine names, of", f"{pool.block_tokens} tokens"))
    if transfers.mismatched_parts:
        rows.append(("parts with a wrong checksum", f"{transfers.mismatched_parts}"))
    if pool.zeroed:
        rows.append(("pages cleared before they were given", f"{pool.zeroed}"))
    rows += _way_back_rows(role, side.way_back)
    rows += _host_rows(side.host, side.tiers)
    rows += _copy_rows(side.copies)
    if role == "decode":
        latency = side.admit_to_ready
        rows.append(("admit to ready p50 / p99", f"{latency.p50_ms:.1f} / {latency.p99_ms:.1f} ms"))
    rows += [(f"  mean {stage.stage}", f"{stage.mean_ms:.2f} ms") for stage in side.admit_to_ready.stages]
    for peer in side.peers:
        credits = f", {peer.free_credits}/{peer.slots} credits" if peer.slots else ""
        rows.append((f"peer {peer.name} {peer.address}", peer.state + credits))
    for namespace in side.namespaces:
        rows += _namespace_rows(namespace)
    for what, value in rows:
        table.add_row(what, value)
    return table


def _of(host: cache.PoolStats) -> str:
    """Words for how many there are to be, where some are missing."""
    return f" of {host.asked_pages}" if host.pages < host.asked_pages else ""


def _way_back_rows(role: str, back: cache.WayBackStats) -> list[tuple[str, str]]:
    if back.setting in ("", "off"):
        return []
    if back.off_because:
        return [("way back", f"off, because {back.off_because}")]
    moved = f"{back.transfers.delta_pages} pages, {size(back.transfers.delta_bytes)}"
    looked = back.look_ups
    if role == "decode":
        return [("way back: sent", moved), ("  look-ups: found / nothing", f"{looked.found} / {looked.nothing}")]
    choices = ", ".join(f"{choice.reason} {choice.count}" for choice in back.choices) or "-"
    last = f"{back.compute_seconds * 1000:.1f} / {back.fetch_seconds * 1000:.1f} ms"
    return [
        (f"way back ({back.setting}): fetched", moved),
        ("  others: found / nothing / late", f"{looked.found} / {looked.nothing} / {looked.late}"),
        ("  prompts that lacked pages", choices),
        ("  last estimates, to compute / to fetch", last),
        ("  the engine computes", f"{back.tokens_per_second:.0f} tokens/s"),
    ]


def _host_rows(host: cache.PoolStats, tiers: cache.TierStats) -> list[tuple[str, str]]:
    """Nothing where there is no host tier."""
    if not host.asked_pages:
        return []
    failed = f"{tiers.spill_failed_pages} / {tiers.restore_failed_pages} / {tiers.mismatched_pages}"
    to_host = _speed((tiers.spilled_pages + tiers.backup_pages) * host.page_bytes, tiers.spill_seconds)
    speed = f"{to_host} / {_speed(tiers.restored_pages * host.page_bytes, tiers.restore_seconds)}"
    rows = [
        ("host pages", f"{host.pages}{_of(host)} x {size(host.page_bytes)}"),
        ("  free", f"{host.free}"),
        ("  cached (evictable)", f"{host.cached} ({host.evictable})"),
        ("  being written / read", f"{host.spilling} / {host.restoring}, {tiers.copies} copies"),
        ("  spilled / copied before eviction", f"{tiers.spilled_pages} / {tiers.backup_pages}"),
        ("  restored", f"{tiers.restored_pages}"),
        ("  mean speed of copies, to / from the host", speed),
        ("  failed spills / restores / of them by checksum", failed),
        ("  dropped from the device / evicted", f"{tiers.dropped_pages} / {tiers.host_evicted_pages}"),
    ]
    if tiers.host_stays:
        rows.insert(1, ("  it stays so", tiers.host_stays))
    if tiers.unstored:
        reasons = ", ".join(f"{each.reason} {each.count}" for each in tiers.unstored)
        rows.append(("  pages of blocks not stored, by why", reasons))
    if tiers.recovered_pages or tiers.discarded_entries:
        recovered = f"{tiers.recovered_pages} / {tiers.unverified_pages} / {tiers.orphan_pages}"
        rows += [
            ("  recovered / not yet verified / orphans", recovered),
            ("  entries of the file discarded", f"{tiers.discarded_entries}"),
        ]
    return rows


def _copy_rows(copies: cache.CopyStats) -> list[tuple[str, str]]:
    """Nothing before the first worker."""
    if not copies.strategies:
        return []
    chosen = "chosen for each" if copies.forced == "auto" else f"{copies.forced}, forced by KVFERRY_COPY"
    rows = [("strategy of copies between the tiers", chosen)]
    for each in copies.strategies:
        if each.copies or len(copies.strategies) == 1:
            moved = f"{each.copies} / {each.descriptors} / {size(each.bytes)}"
            rows.append((f"  {each.strategy}: copies / descriptors / bytes", moved))
    return rows + [(f"  fallback, {reason.reason}", f"{reason.count}") for reason in copies.fallbacks]


def _speed(nbytes: int, seconds: float) -> str:
    return f"{size(nbytes / seconds)}/s" if seconds > 0 else "-"


def _namespace_rows(namespace: cache.NamespaceStats) -> list[tuple[str, str]]:
    queried = namespace.queried_tokens or 1
    quota = f"{namespace.soft_quota or '-'} / {namespace.hard_quota or '-'}"
    return [
        (
            f"namespace {namespace.namespace_id.hex()[:12]}: hit / from the host",
            f"{namespace.hit_tokens / queried:.1%} / {namespace.host_hit_tokens / queried:.1%}",
        ),
        ("  device pages / soft / hard quota", f"{namespace.device_pages} / {quota}"),
        ("  evictable / promised / evicted", f"{namespace.evictable} / {namespace.promised} / {namespace.evicted}"),
        ("  host pages / pinned", f"{namespace.host_pages} / {namespace.pinned_pages}"),
    ]
