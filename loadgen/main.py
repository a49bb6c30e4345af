"""`kvferry loadgen`: multi-turn conversations against an OpenAI-compatible server, and what they cost."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.loadgen.client import Client, ModelInfo, ServerError
from kvferry.loadgen.daemon_stats import StatsError, read_counts
from kvferry.loadgen.dialogue import ChatDialogue, Dialogue, Generation, TokenDialogue
from kvferry.loadgen.report import Report, make_report, print_tables
from kvferry.loadgen.runner import TurnRecord
from kvferry.loadgen.runner import run as run_conversations
from kvferry.loadgen.workload import Workload, text_script, token_script

CHAT = "chat"
COMPLETIONS_TOKENS = "completions-tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, metavar="http://HOST:PORT", help="of the server")
    parser.add_argument(
        "--api",
        choices=(CHAT, COMPLETIONS_TOKENS),
        default=CHAT,
        help="text through /v1/chat/completions, or token ids through /v1/completions (default: %(default)s)",
    )
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument("--timeout", type=_positive, default=120.0, metavar="SECONDS", help="for each part of a reply")
    parser.add_argument(
        "--stats",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a decode daemon whose statistics are read before and after; may be repeated",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    work = parser.add_argument_group("workload")
    work.add_argument("--conversations", type=_whole, default=8, metavar="N", help="default %(default)s")
    work.add_argument("--turns", type=_whole, default=4, metavar="M", help="of each (default %(default)s)")
    work.add_argument("--concurrency", type=_whole, default=4, metavar="C", help="conversations at a time (default 4)")
    work.add_argument("--user-words", type=_whole, default=40, metavar="N", help="of a turn; with token ids: tokens")
    work.add_argument("--system-words", type=_whole_or_0, default=0, metavar="N", help="shared by all conversations")
    work.add_argument("--seed", type=_whole_or_0, default=0, help="the same seed gives the same conversations")
    work.add_argument("--vocabulary", type=_whole, metavar="N", help="token ids are below (default: the server's)")
    reply = parser.add_argument_group("replies")
    reply.add_argument("--max-tokens", type=_whole, default=32, metavar="N", help="default %(default)s")
    reply.add_argument("--temperature", type=_not_negative, default=0.0, help="default 0: greedy")
    reply.add_argument("--ignore-eos", action="store_true", help="replies end at --max-tokens only (an extension)")


def run(args: argparse.Namespace) -> int:
    try:
        report = asyncio.run(_run(args))
    except (ServerError, StatsError, ValueError) as error:
        print(f"kvferry loadgen: {error}", file=sys.stderr)
        return 1
    if args.format == "json":
        print(report.json())
    else:
        print_tables(report, Console())
    return 0 if report.ok else 1


async def _run(args: argparse.Namespace) -> Report:
    workload = Workload(
        conversations=args.conversations,
        turns=args.turns,
        user_words=args.user_words,
        system_words=args.system_words,
        seed=args.seed,
    )
    async with Client(args.url, connections=args.concurrency, timeout_s=args.timeout) as client:
        model = await client.model()
        before = await read_counts(args.stats)
        # on stderr, and only for someone who looks
        console = Console(stderr=True)
        with _progress(console) as progress:
            task = progress.add_task("turns", total=workload.conversations * workload.turns, failed=0)
            failed = 0

            def on_turn(record: TurnRecord) -> None:
                nonlocal failed
                failed += record.error is not None
                progress.update(task, advance=1, failed=failed)

            dialogues = _dialogues(args, workload, model)
            record = await run_conversations(client, dialogues, concurrency=args.concurrency, on_turn=on_turn)
        after = await read_counts(args.stats)
    return make_report(record, after.since(before) if args.stats else None)


def _dialogues(args: argparse.Namespace, workload: Workload, model: ModelInfo) -> Iterator[Dialogue]:
    generation = Generation(
        model=args.model or model.name,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    vocabulary = args.vocabulary or model.vocabulary or 256
    for number in range(workload.conversations):
        if args.api == CHAT:
            yield ChatDialogue(text_script(workload, number), generation)
        else:
            yield TokenDialogue(token_script(workload, number, vocabulary), generation)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def _whole(text: str) -> int:
    return _at_least(1, text)


def _whole_or_0(text: str) -> int:
    return _at_least(0, text)


def _at_least(bound: int, text: str) -> int:
    if not text.isdecimal() or int(text) < bound:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {bound}, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"must be > 0, got {text!r}")
    return value


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text!r}")
    return value
