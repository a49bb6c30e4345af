"""`kvferry loadgen`: multi-turn conversations against an OpenAI-compatible server, and what they cost."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from kvferry.channels import ChannelError, ClientTls, tls_of
from kvferry.loadgen.arguments import (
    CHAT,
    COMPLETIONS_TOKENS,
    add_arguments,
    loop_name,
    make_loop,
    make_workload,
    starts,
)
from kvferry.loadgen.client import Client, ModelInfo, ServerError
from kvferry.loadgen.daemon_stats import DaemonCounts, Reading, StatsError, counted, read_daemons
from kvferry.loadgen.dialogue import ChatDialogue, Dialogue, Generation, TokenDialogue
from kvferry.loadgen.files import FileError, read_report, write_csv, write_json, write_requests
from kvferry.loadgen.plots import plots_missing, write_comparison, write_plots
from kvferry.loadgen.progress import Live
from kvferry.loadgen.report import Report, RunSetup, make_report
from kvferry.loadgen.runner import Closed, Conversation, Open, RunRecord
from kvferry.loadgen.runner import run as run_conversations
from kvferry.loadgen.scripts import Workload, WorkloadError
from kvferry.loadgen.tables import console, print_comparison, print_tables
from kvferry.pauses import short_collections

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    try:
        if args.url is None and args.compare is None:
            raise WorkloadError("--url is needed, or --compare")
        if args.plots is not None and (missing := plots_missing()) is not None:
            raise WorkloadError(f"--plots: {missing}")
        if args.compare is not None:
            reports = (read_report(args.compare[0]), read_report(args.compare[1]))
            names = (str(args.compare[0]), str(args.compare[1]))
            print_comparison(names, reports, console())
            if args.plots is not None:
                write_comparison(names, reports, args.plots)
            return 0
        measured = asyncio.run(_run(args))
    except (ServerError, StatsError, FileError, OSError, ValueError) as error:
        print(f"kvferry loadgen: {error}", file=sys.stderr)
        return 1
    written = _write(args, measured)
    if args.format == "json":
        print(measured.report.json())
    else:
        print_tables(measured.report, console())
    return 0 if measured.complete and written else 1


@dataclass(frozen=True, slots=True)
class Measured:
    report: Report
    record: RunRecord

    @property
    def complete(self) -> bool:
        """Whether every request was answered, nothing ended the run, and all that was asked for is in the report."""
        return self.report.ok and not self.record.stopped and self.report.daemons_missing is None


async def _run(args: argparse.Namespace) -> Measured:
    loop, tls = make_loop(args), tls_of(args)
    in_flight = loop.clients if isinstance(loop, Closed) else loop.in_flight
    headers = dict(args.header)
    async with Client(args.url, connections=in_flight, timeout_s=args.timeout, headers=headers) as client:
        model = await client.model()
        workload = make_workload(args, model.vocabulary)
        turns = sum(map(workload.turns, range(workload.conversations)))
        conversations = _conversations(args, workload, model)
        warm_up = 0
        if args.warm_up:
            if args.warm_up >= workload.conversations:
                raise WorkloadError(f"--warm-up is {args.warm_up}; the workload has {workload.conversations}")
            warm_up = await _warm_up(client, list(islice(conversations, args.warm_up)), loop)
            turns -= sum(map(workload.turns, range(args.warm_up)))
        before = await read_daemons(args.stats, tls)
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        with Live(Console(stderr=True), turns) as live, _stopped_by_signals() as stop, short_collections():
            record = await run_conversations(
                client, conversations, loop, on_turn=live.on_turn, seconds=args.seconds, stop=stop
            )
        counts, missing = await _counted(before, args.stats, tls)
    told = loop_name(args, loop) + (", PARTIAL: stopped by a signal" if record.stopped else "")
    setup = RunSetup(args.url, args.model or model.name, workload.name, told, args.seed, began, warm_up)
    report = make_report(record, counts, setup=setup, target=args.goodput, daemons_missing=missing)
    return Measured(report, record)


class _Counted(NamedTuple):
    counts: DaemonCounts | None  # None: not asked, or
    missing: str | None  # why they are missing


async def _counted(before: Sequence[Reading], addresses: Sequence[str], tls: ClientTls | None) -> _Counted:
    """The daemons' counts since `before`, or why they are missing. What the run measured is not lost with a daemon that
    is gone by its end, or was started anew."""
    if not addresses:
        return _Counted(None, None)
    try:
        return _Counted(counted(before, await read_daemons(addresses, tls)), None)
    except (StatsError, ChannelError) as error:
        return _Counted(None, str(error))


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[asyncio.Event]:
    """Set by the first SIGTERM or SIGINT; the next does what it always does."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()

    def restore() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def stopped() -> None:
        stop.set()
        restore()

    for number in numbers:
        loop.add_signal_handler(number, stopped)
    try:
        yield stop
    finally:
        restore()


async def _warm_up(client: Client, conversations: list[Conversation], loop: Closed | Open) -> int:
    """Runs them to their end. Returns the number of requests. Raises ServerError where one fails."""
    first_s = conversations[0].start_s
    moved = (conversation._replace(start_s=conversation.start_s - first_s) for conversation in conversations)
    record = await run_conversations(client, moved, loop, on_turn=lambda turn: None)
    for turn in record.turns:
        if turn.error is not None:
            raise ServerError(f"a warm-up request failed: {turn.error}")
    return len(record.turns)


def _conversations(args: argparse.Namespace, workload: Workload, model: ModelInfo) -> Iterator[Conversation]:
    """The measured ones of an open loop start at 0, too."""
    generation = Generation(
        model=args.model or model.name,
        temperature=args.temperature,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
        extra=args.extra,
    )
    api = args.api or (COMPLETIONS_TOKENS if args.workload == "trace" else CHAT)
    first_s = 0.0
    for number, start_s in enumerate(starts(args, workload)):
        if number == args.warm_up:
            first_s = start_s
        begin = partial(_dialogue, workload, number, api, generation)
        yield Conversation(number, workload.turns(number), begin, start_s - first_s)


def _dialogue(workload: Workload, number: int, api: str, generation: Generation) -> Dialogue:
    if api == CHAT:
        return ChatDialogue(workload.text(number), generation)
    return TokenDialogue(workload.tokens(number), generation)


def _write(args: argparse.Namespace, measured: Measured) -> bool:
    """Whether all that was asked for could be written; what could not is said, and the rest is written."""
    report, turns = measured.report, measured.record.turns
    files: list[tuple[Path | None, Callable[[Path], object]]] = [
        (args.json, partial(write_json, report)),
        (args.csv, partial(write_csv, report)),
        (args.jsonl, partial(write_requests, turns)),
        (args.plots, partial(write_plots, report, turns)),
    ]
    written = True
    for path, write in files:
        try:
            if path is not None:
                write(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            print(f"kvferry loadgen: {path}: {reason or error}", file=sys.stderr)
            written = False
    return written
