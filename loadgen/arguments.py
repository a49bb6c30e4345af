"""The flags of `kvferry loadgen`, and the workload that they describe."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvferry import flags
from kvferry.channels import add_tls_arguments
from kvferry.loadgen.chats import Chats, read_chats
from kvferry.loadgen.conversation_spec import read_spec
from kvferry.loadgen.distributions import Constant, Distribution, generator, parse
from kvferry.loadgen.report import Target
from kvferry.loadgen.runner import Closed, Open
from kvferry.loadgen.scripts import Workload, WorkloadError
from kvferry.loadgen.shared_prefix import PRESETS, SharedPrefix
from kvferry.loadgen.trace import Trace, read_trace
from kvferry.loadgen.workload import MultiTurn

CHAT = "chat"
COMPLETIONS_TOKENS = "completions-tokens"
WORKLOADS = ("multi-turn", "shared-prefix", "trace", "chats", "generate-conversations")
DEFAULT_OUTPUT = 32
DEFAULT_CONCURRENCY = 4
DEFAULT_VOCABULARY = 256
IN_FLIGHT = 1024  # of an open loop
_TARGETS = {"ttft": "ttft_ms", "itl": "inter_token_ms", "latency": "latency_ms"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="http://HOST:PORT", help="of an OpenAI-compatible server")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="two reports side by side; sends nothing"
    )
    parser.add_argument(
        "--api",
        choices=(CHAT, COMPLETIONS_TOKENS),
        help="text through /v1/chat/completions, or token ids through /v1/completions (default: chat; of a trace: ids)",
    )
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument("--header", type=_header, action="append", default=[], metavar="NAME:VALUE", help="repeatable")
    parser.add_argument(
        "--timeout", type=flags.positive, default=120.0, metavar="SECONDS", help="for each part of a reply"
    )
    parser.add_argument(
        "--stats",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a decode daemon whose statistics are read before and after; may be repeated",
    )
    add_tls_arguments(parser)
    _add_workload(parser.add_argument_group("workload (N: a number, or a distribution such as uniform:10,20)"))
    _add_loop(parser.add_argument_group("loop"))
    reply = parser.add_argument_group("replies")
    reply.add_argument(
        "--max-tokens",
        "--output-tokens",
        type=_distribution,
        metavar="N",
        help=f"of a reply (default: the workload's own, else {DEFAULT_OUTPUT})",
    )
    reply.add_argument("--temperature", type=flags.not_negative, default=0.0, help="default 0: greedy")
    reply.add_argument("--ignore-eos", action="store_true", help="replies end at --max-tokens only (an extension)")
    reply.add_argument("--extra", type=_extra, default={}, metavar="JSON", help="more fields of every request's body")
    out = parser.add_argument_group("report")
    out.add_argument("--format", choices=("table", "json"), default="table")
    out.add_argument("--goodput", type=_target, metavar="ttft:MS,itl:MS,latency:MS", help="count what keeps these")
    out.add_argument("--json", type=Path, metavar="FILE")
    out.add_argument("--csv", type=Path, metavar="FILE")
    out.add_argument("--jsonl", type=Path, metavar="FILE", help="a line a request")
    out.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="PNG files, with --compare one of both; needs matplotlib"
    )


def _add_workload(work: argparse._ArgumentGroup) -> None:
    work.add_argument("--workload", choices=WORKLOADS, default=WORKLOADS[0], help="default %(default)s")
    work.add_argument("--file", type=Path, help="of a trace, of chats, or of vLLM's generate_conversations")
    work.add_argument("--seed", type=flags.whole_or_0, default=0, help="the same seed gives the same requests")
    work.add_argument(
        "--vocabulary", type=flags.whole, metavar="IDS", help="token ids are below (default: the server's)"
    )
    work.add_argument("--conversations", type=flags.whole, metavar="COUNT", help="default 8, or all of a file")
    work.add_argument("--turns", type=_distribution, default=Constant(4), metavar="N", help="default 4")
    work.add_argument(
        "--user-words", type=_distribution, default=Constant(40), metavar="N", help="or tokens, of a turn"
    )
    work.add_argument(
        "--system-words", type=_distribution, default=Constant(0), metavar="N", help="shared by all conversations"
    )
    work.add_argument(
        "--own-words", type=_distribution, default=Constant(0), metavar="N", help="before a conversation's first turn"
    )
    work.add_argument(
        "--think-seconds", type=_distribution, default=Constant(0), metavar="N", help="between reply and next turn"
    )
    work.add_argument("--preset", choices=tuple(PRESETS), default="tiny", help="of shared-prefix (default %(default)s)")
    for name, what in (("prefixes", "how many"), ("prefix-tokens", "of each"), ("suffix-tokens", "of each request")):
        work.add_argument(
            f"--{name}", type=flags.whole, metavar="COUNT", help=f"shared-prefix: {what}, for the preset's"
        )
    work.add_argument("--requests", type=flags.whole, metavar="COUNT", help="shared-prefix: for the preset's")


def _add_loop(loop: argparse._ArgumentGroup) -> None:
    loop.add_argument(
        "--concurrency",
        type=flags.whole,
        metavar="C",
        help=f"requests at a time (default {DEFAULT_CONCURRENCY}, the preset's, or {IN_FLIGHT} of an open loop)",
    )
    loop.add_argument(
        "--active",
        type=flags.whole,
        metavar="A",
        help="closed loop: conversations open at a time (default: as --concurrency)",
    )
    loop.add_argument("--rate", type=flags.positive, metavar="R", help="open loop: conversations that start per second")
    loop.add_argument("--arrivals", choices=("poisson", "constant"), default="poisson", help="default %(default)s")
    loop.add_argument(
        "--speed", type=flags.positive, metavar="X", help="open loop with the trace's own times, so many times faster"
    )
    loop.add_argument(
        "--warm-up",
        type=flags.whole_or_0,
        default=0,
        metavar="COUNT",
        help="first conversations, in none of the numbers",
    )
    loop.add_argument(
        "--seconds",
        type=flags.positive,
        default=math.inf,
        help="what is meant to start later is not sent; an open loop sends all that was meant before, however late",
    )


def make_workload(args: argparse.Namespace, vocabulary: int | None) -> Workload:
    """The workload of the flags. `vocabulary`: the server's, where it said one. Raises WorkloadError."""
    kind, seed, path = str(args.workload), int(args.seed), args.file
    ids = int(args.vocabulary or vocabulary or DEFAULT_VOCABULARY)
    needs_file = kind in WORKLOADS[2:]
    if needs_file != (path is not None):
        raise WorkloadError(f"--file is {'needed by' if needs_file else 'of no use to'} --workload {kind}")
    if kind == "shared-prefix":
        preset = PRESETS[args.preset]
        sizes = replace(
            preset,
            prefixes=args.prefixes or preset.prefixes,
            prefix=args.prefix_tokens or preset.prefix,
            suffix=args.suffix_tokens or preset.suffix,
            requests=args.requests or preset.requests,
        )
        return SharedPrefix(sizes, seed=seed, vocabulary=ids, output_tokens=args.max_tokens, label=args.preset)
    if kind == "trace":
        requests = read_trace(path, args.conversations)
        return Trace(
            requests, seed=seed, vocabulary=ids, speed=args.speed, output_tokens=args.max_tokens, label=path.name
        )
    if kind == "chats":
        chats = read_chats(path, args.conversations)
        return Chats(chats, seed=seed, think_s=args.think_seconds, output_tokens=args.max_tokens, label=path.name)
    if kind == "generate-conversations":
        spec = read_spec(path, seed=seed, vocabulary=ids, think_s=args.think_seconds)
        return replace(
            spec,
            conversations=args.conversations or spec.conversations,
            output_tokens=args.max_tokens or spec.output_tokens,
        )
    return MultiTurn(
        conversations=args.conversations or 8,
        turns_each=args.turns,
        user_words=args.user_words,
        output_tokens=args.max_tokens or Constant(DEFAULT_OUTPUT),
        system_words=args.system_words,
        own_words=args.own_words,
        think_s=args.think_seconds,
        seed=seed,
        vocabulary=ids,
    )


def make_loop(args: argparse.Namespace) -> Closed | Open:
    """The loop of the flags. Raises WorkloadError."""
    if args.speed is not None and (args.workload != "trace" or args.rate is not None):
        raise WorkloadError("--speed is for the times of a trace, without --rate")
    if args.rate is not None or args.speed is not None:
        if args.active is not None:
            raise WorkloadError("--active is for a closed loop, without --rate and --speed")
        return Open(args.concurrency or IN_FLIGHT)
    clients = args.concurrency or (
        PRESETS[args.preset].concurrency if args.workload == "shared-prefix" else DEFAULT_CONCURRENCY
    )
    try:
        return Closed(clients, args.active or clients)
    except ValueError as error:
        raise WorkloadError(f"--{error}") from None


def starts(args: argparse.Namespace, workload: Workload) -> Iterator[float]:
    """The time at which each conversation starts, in seconds; of a closed loop it means nothing."""
    if args.rate is None:
        for number in range(workload.conversations):
            yield workload.start_s(number) or 0.0
        return
    source = generator(args.seed, "arrivals")
    at = 0.0
    for _ in range(workload.conversations):
        yield at
        at += float(source.exponential(1 / args.rate)) if args.arrivals == "poisson" else 1 / args.rate


def loop_name(args: argparse.Namespace, loop: Closed | Open) -> str:
    if isinstance(loop, Closed):
        return f"closed loop: {loop.clients} requests at a time, of {loop.active} conversations"
    if args.rate is not None:
        return f"open loop: {args.arrivals}, {args.rate:g} conversations/s, at most {loop.in_flight} requests at a time"
    return f"open loop: the trace's times / {args.speed:g}, at most {loop.in_flight} requests at a time"


def _distribution(text: str) -> Distribution:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} (in {text!r})") from None


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"must be NAME:VALUE, got {text!r}")
    return name.strip(), value.strip()


def _extra(text: str) -> dict[str, object]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return fields


def _target(text: str) -> Target:
    bounds: dict[str, float] = {}
    for word in text.split(","):
        name, _, value = word.partition(":")
        if name not in _TARGETS:
            raise argparse.ArgumentTypeError(f"must name {', '.join(_TARGETS)}, got {word!r}")
        bounds[_TARGETS[name]] = flags.positive(value)
    return Target(**bounds)
