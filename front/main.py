"""`kvferry front`: the OpenAI-compatible front end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterator
from itertools import chain

from kvferry import flags, listening, tracing
from kvferry.channels import ChannelError, ClientTls, add_tls_arguments, tls_of
from kvferry.front import vllm_server as front_vllm_server
from kvferry.front.edge import settings as edge_settings
from kvferry.front.edge.settings import EdgeSettings
from kvferry.front.routing import RoutingRule
from kvferry.front.server import FrontConfig, serve
from kvferry.front.service import ServiceConfig
from kvferry.front.vllm import VllmConfig
from kvferry.front.vllm_places import parse_decode, parse_prefill
from kvferry.logs import LOG_FORMAT
from kvferry.pauses import short_collections
from kvferry.secret_files import SecretFileError
from kvferry.signals import end_signals

MAX_PROCESSES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Help shows them in this order."""
    defaults = ServiceConfig(prefill=(), decode=())
    _add_servers(parser)
    _add_chat(parser, defaults)
    edge_settings.add_arguments(parser)
    parser.add_argument("--otel", default="", metavar="URL", help=tracing.FLAG_HELP)
    _add_deadlines(parser, defaults)
    _add_reply_memory(parser, defaults)
    _add_routing(parser, defaults)
    add_tls_arguments(parser)


def _add_servers(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of its address and of the servers it is before."""
    parser.add_argument(
        "--listen",
        type=listening.listen,
        default=listening.Listen("127.0.0.1", 8000),
        metavar="HOST:PORT",
        help="default %(default)s",
    )
    listening.add_insecure_argument(parser)
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", nargs="+", action="extend", default=[], metavar="HOST:PORT", help=f"{role} servers"
        )
    vllm = parser.add_argument_group("before vLLM servers instead (kvferry's connector in each)")
    vllm.add_argument(
        "--vllm-prefill",
        nargs="+",
        action="extend",
        default=[],
        type=flags.parsed(parse_prefill),
        metavar="NAME=URL[,RANKS]",
        help="prefill servers, each with its daemon's name; with data-parallel ranks NAME has {dp_rank}, with a URL of "
        "dns+http://NAME:PORT, whose addresses are looked up again and again, {address}",
    )
    vllm.add_argument(
        "--vllm-decode",
        nargs="+",
        action="extend",
        default=[],
        type=flags.parsed(parse_decode),
        metavar="[DAEMON=]URL[,RANKS]",
        help="decode servers; http://HOST:PORT, or dns+http://NAME:PORT for all addresses of a name. DAEMON: HOST:PORT "
        "of the daemon beside it, with {dp_rank} and {address} likewise; while it is away nothing is handed over there",
    )
    vllm.add_argument(
        "--first-token",
        choices=("prefill", "decode"),
        default="decode",
        help="whose first token goes to the client; prefill's goes at once, and needs KVFerryScheduler in each decode "
        "server (default %(default)s)",
    )
    vllm.add_argument(
        "--processes",
        type=flags.whole,
        default=1,
        metavar="N",
        help="that share the requests, and --max-requests (default 1)",
    )


def _add_chat(parser: argparse.ArgumentParser, defaults: ServiceConfig) -> None:
    """The model as clients see it, and bounds on their requests."""
    parser.add_argument("--model-name", help="as clients call the model (default: as the servers do)")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="default: the folder that the servers name")
    parser.add_argument(
        "--chat-max-tokens",
        type=flags.whole,
        default=defaults.chat_max_tokens,
        metavar="N",
        help="new tokens of a chat request that names no bound (default %(default)s)",
    )
    parser.add_argument(
        "--max-requests",
        type=flags.whole,
        default=defaults.max_requests,
        metavar="N",
        help="at a time; more get 429 (default %(default)s)",
    )


def _add_deadlines(parser: argparse.ArgumentParser, defaults: ServiceConfig) -> None:
    waits = parser.add_argument_group("deadlines, in seconds")
    waits.add_argument(
        "--wait-seconds", type=flags.positive, default=60.0, help="for the servers at start (default 60)"
    )
    waits.add_argument("--first-token-seconds", type=flags.positive, default=defaults.first_token_s, help="default 60")
    waits.add_argument("--next-token-seconds", type=flags.positive, default=defaults.next_token_s, help="default 30")
    waits.add_argument(
        "--reply-seconds",
        type=flags.positive,
        default=600.0,
        help="for a whole reply that is not streamed, before vLLM servers (default %(default)g)",
    )
    waits.add_argument("--lookup-seconds", type=flags.positive, default=defaults.lookup_s, help="default 0.5")
    waits.add_argument(
        "--grace", type=flags.positive, default=30.0, help="for running requests after SIGTERM (default 30)"
    )


def _add_reply_memory(parser: argparse.ArgumentParser, defaults: ServiceConfig) -> None:
    memory = parser.add_argument_group("memory of replies, whose exact tokens later prompts of a chat get")
    memory.add_argument("--reply-memory-entries", type=flags.whole, default=defaults.reply_entries, metavar="N")
    memory.add_argument("--reply-memory-tokens", type=flags.whole, default=defaults.reply_tokens, metavar="N")


def _add_routing(parser: argparse.ArgumentParser, defaults: ServiceConfig) -> None:
    routing = parser.add_argument_group(
        "routing: a decode server is passed over when its load is above FACTOR x the mean load + SLACK"
    )
    routing.add_argument("--load-factor", type=_at_least_one, default=defaults.rule.load_factor, metavar="FACTOR")
    routing.add_argument("--load-slack", type=flags.not_negative, default=defaults.rule.load_slack, metavar="SLACK")


def run(args: argparse.Namespace) -> int:
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=LOG_FORMAT)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each call of a server
    host, port = args.listen
    if problem := _problem(args):
        print(f"kvferry front: {problem}", file=sys.stderr)
        return 2
    try:
        edge = edge_settings.settings_of(args)
        daemon_tls = tls_of(args)
        if args.vllm_decode:
            return _run_before_vllm(args, host, port, edge, daemon_tls)
        with _process(args):
            return _run(args, host, port, edge, daemon_tls)
    except (SecretFileError, ChannelError, tracing.TracingError) as error:
        print(f"kvferry front: {error}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def _process(args: argparse.Namespace) -> Iterator[None]:
    """What each serving process has: traces, whose exporters have threads, and short collections."""
    try:
        tracing.configure("kvferry-front", args.otel)
        with short_collections():
            yield
    finally:
        tracing.shutdown()


def _run_before_vllm(
    args: argparse.Namespace, host: str, port: int, edge: EdgeSettings, daemon_tls: ClientTls | None
) -> int:
    return front_vllm_server.run(
        VllmConfig(
            prefill=tuple(chain.from_iterable(args.vllm_prefill)),
            decode=tuple(chain.from_iterable(args.vllm_decode)),
            first_token_s=args.first_token_seconds,
            next_token_s=args.next_token_seconds,
            reply_s=args.reply_seconds,
            max_requests=args.max_requests,
            load_factor=args.load_factor,
            load_slack=args.load_slack,
            engine_token=edge.engine_token,
            passes_authorization=edge.keys is None,
            first_token=args.first_token,
            daemon_tls=daemon_tls,
        ),
        front_vllm_server.VllmServing(host, port, args.wait_seconds, args.grace, args.processes, edge),
        under=lambda: _process(args),
    )


def _run(args: argparse.Namespace, host: str, port: int, edge: EdgeSettings, daemon_tls: ClientTls | None) -> int:
    config = FrontConfig(
        host=host,
        port=port,
        service=ServiceConfig(
            prefill=tuple(args.prefill),
            decode=tuple(args.decode),
            model_name=args.model_name,
            tokenizer=args.tokenizer,
            first_token_s=args.first_token_seconds,
            next_token_s=args.next_token_seconds,
            lookup_s=args.lookup_seconds,
            max_requests=args.max_requests,
            chat_max_tokens=args.chat_max_tokens,
            reply_entries=args.reply_memory_entries,
            reply_tokens=args.reply_memory_tokens,
            rule=RoutingRule(args.load_factor, args.load_slack),
            daemon_tls=daemon_tls,
            engine_token=edge.engine_token,
        ),
        wait_s=args.wait_seconds,
        grace_s=args.grace,
        edge=edge,
    )
    try:
        asyncio.run(_serve(config))
    except OSError as error:
        print(f"kvferry front: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _problem(args: argparse.Namespace) -> str:
    """The objection to these flags, empty if there is none: which servers it is before must be clear, and who may reach
    it."""
    if problem := listening.problem(args, "requests and replies are plain HTTP, without a login"):
        return problem
    if problem := edge_settings.problem(args):
        return problem
    if args.vllm_decode or args.vllm_prefill:
        if args.prefill or args.decode:
            return "--vllm-prefill and --vllm-decode do not go with --prefill and --decode"
        if args.processes > MAX_PROCESSES:
            return f"--processes is {args.processes}; it must be 1 to {MAX_PROCESSES}"
        return "" if args.vllm_decode else "--vllm-decode is required"
    if args.first_token != "decode":
        return f"--first-token is {args.first_token}; before reference workers it must be decode"
    if args.processes > 1:  # each would have a memory of replies of its own
        return f"--processes is {args.processes}; before reference workers it must be 1"
    return "" if args.prefill and args.decode else "--prefill and --decode are required (or --vllm-decode)"


async def _serve(config: FrontConfig) -> None:
    stop = asyncio.Event()
    for number in end_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(config, stop=stop, ready=lambda address: print(f"ready: front {address}", flush=True))


def _at_least_one(text: str) -> float:
    value = flags.not_negative(text)
    if value < 1:  # the least loaded server would be above the bound, too
        raise argparse.ArgumentTypeError(f"must be >= 1, got {text!r}")
    return value
