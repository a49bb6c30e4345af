"""`kvferry flush`, `pin`, `unpin` and `dump`: what an operator does to a running daemon, over its Unix socket.

Exit status 1 where the daemon refuses, 2 where a flag is wrong or no daemon answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from kvferry.daemon.cli.find_daemon import NoDaemon, default_socket
from kvferry.daemon.core.pins import MAX_PIN_SECONDS
from kvferry.daemon.services.admin import DUMP_NODES, MAX_DUMP_NODES
from kvferry.flags import is_whole
from kvferry.proto import admin_pb2 as admin
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common
from kvferry.proto.admin_pb2_grpc import AdminStub
from kvferry.proto.cache_pb2_grpc import CacheStub
from kvferry.proto.limits import MAX_MESSAGE_BYTES
from kvferry.radix.digests import DIGEST_BYTES, MAX_PAGE_SIZE, DigestChain

TIMEOUT_SECONDS = 30.0  # a flush of a large tree takes a while
STATS_SECONDS = 5.0
MIN_PREFIX = 8  # hex digits of a namespace
ALGORITHM = "sha256_cbor"  # that --tokens can hash by
_ROLES = {"decode": common.ROLE_DECODE, "prefill": common.ROLE_PREFILL}
_NOBODY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class UsageError(Exception):
    """A flag that cannot be, or nobody to ask."""


class AdminRefused(Exception):
    """The daemon says no."""


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand, as main.py asks for one. `act` prints what was done."""

    name: str
    own_arguments: Callable[[argparse.ArgumentParser], None]
    act: Callable[[argparse.Namespace, grpc.Channel], None]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--socket", metavar="PATH", help="of the daemon (default: the one where daemons make it without --socket)"
        )
        parser.add_argument("--role", choices=tuple(_ROLES), help="of a daemon with both roles, which one")
        self.own_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        try:
            socket = args.socket or default_socket(args.role)
            options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
            with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
                try:
                    self.act(args, channel)
                except grpc.RpcError as error:
                    if error.code() in _NOBODY:
                        raise UsageError(f"no daemon answers at {socket}: {error.details()}") from error
                    raise AdminRefused(f"{error.code().name}: {error.details()}") from error
        except (UsageError, NoDaemon, AdminRefused) as error:
            print(f"kvferry {self.name}: {error}", file=sys.stderr)
            return 1 if isinstance(error, AdminRefused) else 2
        except KeyboardInterrupt:
            return 130
        return 0


# -- flush -------------------------------------------------------------------------------------------------------


def _flush_arguments(parser: argparse.ArgumentParser) -> None:
    _namespace_argument(parser, "default: all")
    parser.add_argument("--strict", action="store_true", help="free nothing if any page is held")


def _flush(args: argparse.Namespace, channel: grpc.Channel) -> None:
    namespace_id = _resolved(args, channel) if args.namespace is not None else b""
    request = admin.FlushRequest(role=_role(args), namespace_id=namespace_id, strict=args.strict)
    reply: admin.FlushReply = AdminStub(channel).Flush(request, timeout=TIMEOUT_SECONDS)
    print(f"freed {reply.device_pages} device pages and {reply.host_pages} host pages; {reply.skipped_pages} are held")


# -- pin and unpin -----------------------------------------------------------------------------------------------


def _pin_arguments(parser: argparse.ArgumentParser) -> None:
    _namespace_argument(parser, "may be left out where the daemon has one only")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--digests", metavar="HEX|FILE", help="64 hex digits for every full page, or a file of them")
    prompt.add_argument(
        "--tokens",
        metavar="FILE",
        help=f"JSON list of token ids, hashed here as the daemon's workers hash them ({ALGORITHM} only)",
    )
    parser.add_argument(
        "--page-size",
        type=int,
        metavar="TOKENS",
        help="for --tokens: refuse where the daemon has another (default: its)",
    )
    parser.add_argument("--seconds", type=int, required=True, metavar="N", help=f"1 to {MAX_PIN_SECONDS}")


def _pin(args: argparse.Namespace, channel: grpc.Channel) -> None:
    if not 1 <= args.seconds <= MAX_PIN_SECONDS:
        raise UsageError(f"--seconds is {args.seconds}; it must be 1 to {MAX_PIN_SECONDS}")
    if args.page_size is not None and not 1 <= args.page_size <= MAX_PAGE_SIZE:
        raise UsageError(f"--page-size is {args.page_size}; it must be 1 to {MAX_PAGE_SIZE}")
    given = _digests(args.digests) if args.digests is not None else b""
    tokens = _tokens(args.tokens) if args.tokens is not None else []
    namespace_id, facts = _found(args, channel)
    if args.page_size is not None and args.page_size != facts.page_size:
        raise UsageError(f"--page-size is {args.page_size}, the daemon's is {facts.page_size}; leave the flag out")
    digests = given or _hashed(args.tokens, tokens, facts)
    request = admin.PinRequest(role=_role(args), namespace_id=namespace_id, digests=digests, seconds=args.seconds)
    reply: admin.PinReply = AdminStub(channel).Pin(request, timeout=TIMEOUT_SECONDS)
    print(f"pin {reply.pin} holds {reply.pinned_tokens} tokens for {args.seconds} s")


def _digests(text: str) -> bytes:
    if not _is_digests(text):
        try:
            with open(text, encoding="ascii") as file:
                text = "".join(file.read().split())
        except (OSError, UnicodeError) as error:
            raise UsageError(
                f"--digests: neither hex digits, 64 a page, nor a file that can be read: {error}"
            ) from error
        if not _is_digests(text):
            raise UsageError(f"--digests: the file has {len(text)} characters, not hex digits, 64 a page")
    return bytes.fromhex(text)


def _is_digests(text: str) -> bool:
    return len(text) > 0 and len(text) % (2 * DIGEST_BYTES) == 0 and _is_hex(text)


def _is_hex(text: str) -> bool:
    return set(text) <= set("0123456789abcdefABCDEF")


def _tokens(path: str) -> list[int]:
    """Whether they are token ids is found out by hashing them."""
    try:
        with open(path, encoding="utf-8") as file:
            tokens = json.load(file)
        if not isinstance(tokens, list):
            raise ValueError("it is not a list")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--tokens {path}: {error}") from error
    return tokens


def _hashed(path: str, tokens: list[int], facts: cache.DigestFacts) -> bytes:
    try:
        digests = page_digests(tokens, facts)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--tokens {path}: {error}") from error
    if not digests:
        raise UsageError(f"--tokens {path}: {len(tokens)} tokens are not one full page of {facts.page_size}")
    return digests


def page_digests(tokens: list[int], facts: cache.DigestFacts) -> bytes:
    """32 bytes for each full page, as the daemon's workers name it: a page's digest is that of its last tokens.
    ValueError or TypeError say why not."""
    if facts.algorithm != ALGORITHM:
        raise ValueError(
            f"the daemon's pages are named by {facts.algorithm or 'what it does not say'}, and this command hashes by "
            f"{ALGORITHM} only; give --digests"
        )
    step = facts.digest_tokens or facts.page_size
    chain = DigestChain(page_size=step, parent=facts.root_digest)
    chain.extend(tokens)
    digests, each = chain.digests, facts.page_size // step * DIGEST_BYTES
    return b"".join(digests[end - DIGEST_BYTES : end] for end in range(each, len(digests) + 1, each))


def _unpin_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pin", metavar="PIN|all", help="its number, as `kvferry pin` and `kvferry dump` show it")


def _unpin(args: argparse.Namespace, channel: grpc.Channel) -> None:
    if args.pin != "all" and not (is_whole(args.pin, 20) and 1 <= int(args.pin) < 1 << 64):
        raise UsageError(f"PIN is {args.pin!r}; it must be a pin's number or `all`")
    number = 0 if args.pin == "all" else int(args.pin)
    request = admin.UnpinRequest(role=_role(args), pin=number)
    reply: admin.UnpinReply = AdminStub(channel).Unpin(request, timeout=TIMEOUT_SECONDS)
    if number and not reply.unpinned:
        raise AdminRefused(f"there is no pin {number}")
    print(f"ended {reply.unpinned} {'pin' if reply.unpinned == 1 else 'pins'}")


# -- dump --------------------------------------------------------------------------------------------------------


def _dump_arguments(parser: argparse.ArgumentParser) -> None:
    _namespace_argument(parser, "default: all")
    parser.add_argument(
        "--limit",
        type=int,
        default=DUMP_NODES,
        metavar="N",
        help=f"nodes, 1 to {MAX_DUMP_NODES} (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="one line, digests in full")


def _dump(args: argparse.Namespace, channel: grpc.Channel) -> None:
    if not 1 <= args.limit <= MAX_DUMP_NODES:
        raise UsageError(f"--limit is {args.limit}; it must be 1 to {MAX_DUMP_NODES}")
    namespace_id = _resolved(args, channel) if args.namespace is not None else b""
    request = admin.DumpRequest(role=_role(args), namespace_id=namespace_id, limit=args.limit)
    reply: admin.DumpReply = AdminStub(channel).Dump(request, timeout=TIMEOUT_SECONDS)
    print(_dump_json(reply) if args.json else _dump_text(reply), flush=True)


def _dump_json(reply: admin.DumpReply) -> str:
    nodes, pins = ([_plain(view) for view in views] for views in (reply.nodes, reply.pins))
    return json.dumps({"total_nodes": reply.total_nodes, "nodes": nodes, "pins": pins})


def _plain(view: admin.NodeView | admin.PinView) -> dict[str, object]:
    """Every field, bytes in hex digits."""
    values = ((field.name, getattr(view, field.name)) for field in view.DESCRIPTOR.fields)
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in values}


def _dump_text(reply: admin.DumpReply) -> str:
    form = "{:<12} {:>7} {:>6} {:<6} {:>5} {:>6} {:>8} {:>9} {:<12} {:<12} {}"
    titles = ("namespace", "depth", "pages", "tier", "locks", "hits", "priority", "idle s", "first", "last", "")
    lines = [form.format(*titles).rstrip()] if reply.nodes else []
    for node in reply.nodes:
        tier = " ".join(name for name, there in (("dev", node.device), ("host", node.host)) if there)
        flags = (("output", node.output), ("orphan", node.orphan), ("copying", node.copying))
        line = form.format(
            node.namespace_id.hex()[:12],
            node.depth,
            node.pages,
            tier.replace("dev host", "both"),
            node.locks,
            node.hits,
            node.priority,
            f"{node.idle_seconds:.1f}",
            node.first_digest.hex()[:12],
            node.last_digest.hex()[:12],
            " ".join(name for name, there in flags if there),
        )
        lines.append(line.rstrip())
    lines.append(f"{len(reply.nodes)} of {reply.total_nodes} nodes")
    for pin in reply.pins:
        held = f"holds {pin.tokens} tokens of {pin.namespace_id.hex()[:12]}"
        lines.append(f"pin {pin.pin} {held}, {pin.seconds_left:.0f} s left")
    return "\n".join(lines)


# -- what they share ---------------------------------------------------------------------------------------------


def _namespace_argument(parser: argparse.ArgumentParser, otherwise: str) -> None:
    parser.add_argument(
        "--namespace", metavar="HEX", help=f"as in `kvferry stats`, its first {MIN_PREFIX} digits or more ({otherwise})"
    )


def _role(args: argparse.Namespace) -> common.Role:
    return _ROLES[args.role] if args.role else common.ROLE_UNSPECIFIED


def _resolved(args: argparse.Namespace, channel: grpc.Channel) -> bytes:
    return _found(args, channel)[0]


def _found(args: argparse.Namespace, channel: grpc.Channel) -> tuple[bytes, cache.DigestFacts]:
    """The namespace id that --namespace begins, or the only one there is; and how its pages are named."""
    prefix = "" if args.namespace is None else str(args.namespace).lower()
    if args.namespace is not None and not (MIN_PREFIX <= len(prefix) <= 64 and _is_hex(prefix)):
        raise UsageError(f"--namespace is {args.namespace!r}; it must be {MIN_PREFIX} to 64 hex digits")
    stats: cache.StatsReply = CacheStub(channel).Stats(cache.StatsRequest(), timeout=STATS_SECONDS)
    role = _role(args)
    ids = {
        namespace.namespace_id: side.digests
        for side in stats.sides
        if role in (common.ROLE_UNSPECIFIED, side.role)
        for namespace in side.namespaces
        if namespace.namespace_id.hex().startswith(prefix)
    }
    if not ids:
        raise AdminRefused(f"the daemon has no namespace {prefix}".rstrip())
    if len(ids) > 1:
        names = ", ".join(sorted(found.hex()[:16] for found in ids))
        raise UsageError(f"--namespace {prefix or 'must be given'}: the daemon has {names}".replace("  ", " "))
    return ids.popitem()


flush = Command("flush", _flush_arguments, _flush)
pin = Command("pin", _pin_arguments, _pin)
unpin = Command("unpin", _unpin_arguments, _unpin)
dump = Command("dump", _dump_arguments, _dump)
