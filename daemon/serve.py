"""`kvferry serve`: flags to configuration, and the daemon's run."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import sys

from kvferry.daemon.config import (
    STORAGES,
    ConfigError,
    DaemonConfig,
    parse_device,
    parse_quota,
    parse_size,
    runtime_dir,
)
from kvferry.daemon.namespaces import Quota
from kvferry.radix.policy import policy_names

_SAME = [  # flags that are settings as they stand
    "page_size",
    "storage",
    "device",
    "shm_dir",
    "slots",
    "max_tokens",
    "queue",
    "max_peers",
    "max_workers",
    "admission_seconds",
    "transfer_seconds",
    "heartbeat_seconds",
    "peer_lost_seconds",
    "grace_seconds",
    "stalled_seconds",
    "orphaned_share",
    "copy_threads",
    "reuse",
    "host_dir",
    "checksums",
    "policy",
    "evict_output_first",
    "write_through_hits",
    "overcommit",
    "overtakes",
    "insecure",
    "reflection",
]

DEFAULT_PORTS = {"decode": 7070, "prefill": 7071, "both": 7070}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(DaemonConfig)}
    parser.add_argument("--role", choices=("decode", "prefill", "both"), required=True)
    parser.add_argument("--name", help="by which front ends and peers know this daemon (default: the role)")
    parser.add_argument("--listen", metavar="HOST:PORT", help="for peers, statistics and look-ups (default: loopback)")
    parser.add_argument("--socket", metavar="PATH", help="Unix socket of the workers (default: in XDG_RUNTIME_DIR)")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=HOST:PORT", help="a prefill daemon; may be repeated"
    )
    parser.add_argument("--pool-bytes", default="1GiB", metavar="SIZE", help="of the KV pool (default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=defaults["page_size"], metavar="TOKENS")
    parser.add_argument("--shm-dir", default=defaults["shm_dir"], metavar="DIR")
    parser.add_argument(
        "--device",
        default=defaults["device"],
        metavar="cpu|cuda:I,...",
        help="where the pool is: shared memory, or a GPU for each rank (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="tensor-parallel ranks that share the pages (default: one a device)"
    )
    parser.add_argument(
        "--storage",
        choices=tuple(STORAGES),
        default=defaults["storage"],
        help="of a rank's pool: whole pages, a tensor for each K and V of a layer, or one a layer (default: page)",
    )
    parser.add_argument("--slots", type=int, default=defaults["slots"], help="a session and rank")
    parser.add_argument("--slot-bytes", metavar="SIZE", help="default: 8MiB, on GPUs 64MiB")
    parser.add_argument("--max-tokens", type=int, default=defaults["max_tokens"], help="prompt + output of a request")
    parser.add_argument("--queue", type=int, default=defaults["queue"], help="requests that may wait")
    parser.add_argument("--max-peers", type=int, default=defaults["max_peers"])
    parser.add_argument("--max-workers", type=int, default=defaults["max_workers"])
    parser.add_argument("--admission-seconds", type=float, default=defaults["admission_seconds"], help="at most")
    parser.add_argument("--transfer-seconds", type=float, default=defaults["transfer_seconds"])
    parser.add_argument("--heartbeat-seconds", type=float, default=defaults["heartbeat_seconds"])
    parser.add_argument("--peer-lost-seconds", type=float, default=defaults["peer_lost_seconds"])
    parser.add_argument("--grace-seconds", type=float, default=defaults["grace_seconds"])
    parser.add_argument(
        "--stalled-seconds",
        type=float,
        default=defaults["stalled_seconds"],
        metavar="S",
        help="not healthy when a part of the daemon has not moved for so long (default: %(default)s)",
    )
    parser.add_argument(
        "--orphaned-share",
        type=float,
        default=defaults["orphaned_share"],
        metavar="SHARE",
        help="of a pool that may belong to lost workers before requests are refused (default: %(default)s)",
    )
    parser.add_argument("--copy-threads", type=int, default=defaults["copy_threads"])
    parser.add_argument("--host-bytes", default="0", metavar="SIZE", help="of the host tier (default: none)")
    parser.add_argument(
        "--host-dir",
        default="",
        metavar="DIR",
        help="keep the host tier in a file there, to be found at the next start",
    )
    parser.add_argument(
        "--checksums",
        choices=("on", "off"),
        default="off",
        help="of spilled pages, verified whenever they are restored",
    )
    parser.add_argument("--policy", choices=policy_names(), default=defaults["policy"], help="of eviction")
    parser.add_argument("--evict-output-first", action="store_true", help="generated pages go before prompts' pages")
    parser.add_argument(
        "--write-through-hits",
        type=int,
        default=defaults["write_through_hits"],
        metavar="N",
        help="copy what was hit so often to the host before it is evicted (default: 0, only when it is evicted)",
    )
    parser.add_argument(
        "--quota",
        action="append",
        default=[],
        metavar="NAMESPACE=SOFT:HARD[:HOST_SOFT:HOST_HARD]",
        help="pages that others may not evict, and pages at most (0: none), of a namespace (hexadecimal) or of "
        "`default`, all others; may be repeated",
    )
    parser.add_argument(
        "--overcommit",
        type=float,
        default=defaults["overcommit"],
        metavar="FACTOR",
        help="promise 1/FACTOR of the pages that requests may grow by; the youngest is retracted when it fails",
    )
    parser.add_argument(
        "--overtakes",
        type=int,
        default=defaults["overtakes"],
        metavar="K",
        help="later requests that may overtake a waiting one that does not fit (default: %(default)s)",
    )
    parser.add_argument("--reuse", choices=("on", "off"), default="on", help="off: the baseline of comparisons")
    parser.add_argument("--ucx-ports", default="21000-21063", metavar="FIRST-LAST", help="of NIXL's data plane")
    parser.add_argument("--insecure", action="store_true", help="allow an address that is not loopback without TLS")
    parser.add_argument("--reflection", action="store_true", help="serve gRPC reflection")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def config_of(args: argparse.Namespace) -> DaemonConfig:
    """ConfigError where a flag cannot be."""
    peers: dict[str, str] = {}
    for entry in args.peer:
        name, equals, address = entry.partition("=")
        if not equals or name in peers:
            raise ConfigError(f"--peer {entry!r} is not NAME=HOST:PORT, or names a peer twice")
        peers[name] = address
    quotas: dict[str, Quota] = {}
    for entry in args.quota:
        namespace, quota = parse_quota(entry)
        if namespace in quotas:
            raise ConfigError(f"--quota {entry!r} names {namespace} twice")
        quotas[namespace] = quota
    first, _, last = args.ucx_ports.partition("-")
    if not (first.isdigit() and last.isdigit() and 1024 <= int(first) <= int(last) <= 65535):
        raise ConfigError(f"--ucx-ports {args.ucx_ports!r} is not FIRST-LAST within 1024-65535")
    roles = ("decode", "prefill") if args.role == "both" else (args.role,)
    same = {name: getattr(args, name) for name in _SAME}
    devices = parse_device(args.device)
    return DaemonConfig(
        roles=roles,
        name=args.name or args.role,
        listen=args.listen or f"127.0.0.1:{DEFAULT_PORTS[args.role]}",
        socket=args.socket or os.path.join(runtime_dir(), f"kvferry-{args.role}.sock"),
        peers=peers,
        pool_bytes=parse_size(args.pool_bytes),
        ranks=max(1, len(devices)) if args.ranks is None else args.ranks,
        slot_bytes=parse_size(args.slot_bytes or ("64MiB" if devices else "8MiB")),
        host_bytes=parse_size(args.host_bytes),
        quotas=quotas,
        ucx_ports=(int(first), int(last)),
        **same,
    )


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = config_of(args)
        asyncio.run(_serve(config))
    except (ConfigError, OSError) as error:
        print(f"kvferry serve: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(config: DaemonConfig) -> None:
    # gRPC's core and NIXL are imported only here, so that a wrong flag is answered at once.
    from kvferry.daemon.server import Daemon

    daemon = Daemon(config)
    try:
        await daemon.start()
    except BaseException:
        daemon.discard()
        raise
    print(f"ready: daemon {daemon.address}", flush=True)
    await daemon.run_until_stopped()
