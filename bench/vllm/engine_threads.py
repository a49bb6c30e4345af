"""What a connector costs an engine that has other things to do: CPU time of the engine core's threads for each request,
TTFT and requests/s, of servers that are asked by turns.

python bench/vllm/engine_threads.py --plain none=http://127.0.0.1:8100,PID --plain kvferry=http://127.0.0.1:8101,PID \\
    [--pair p=URL,PID d=URL,PID] [--at-once 1 32] [--output FILE]
python bench/vllm/engine_threads.py --start --hooks --at-once 1 --turns 6 --more 256

`--start` runs vLLM as cluster.py does, one server alone and a pair, of a small model of random weights; on CPUs
"copies" moves a prompt's bytes, which on a GPU its copy engines do. With `--hooks` a clock is read around each call of
the pair's connector, and of what KVFerryScheduler adds: a part of "main", without what steps take that only wait and
what vLLM does behind any connector's load (timed_steps.py). PID is that of a server's first process; its engine core
is all processes below it: on a GPU one for a rank, on CPUs the scheduler has one of its own. `--plain` servers get
requests without transfer parameters, whose answer is one token; a `--pair` gets both halves of each at once.
Prompts are token ids, made JSON before the clock starts: chats of a first turn and turns that add to it. A round asks
each server in turn, the order turning round; the first round of a server is left out. CPU times are of
/proc/PID/task/*/schedstat (nanoseconds; where the kernel has none of stat, in ticks of 10 ms): "main" is the thread
that schedules and computes; "requests", "copies" and "index" are the connector's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import httpx
from chat import new_client
from cluster import DEVICES, PYTHON, SCHEDULER, SMALL, Cluster, Engine, Spec, machine
from rich.console import Console
from rich.table import Table
from small_models import model_of_heads
from timed_steps import TIMED_CONNECTOR, read_steps
from versions import version_of

TOP_ID = 100_000 if DEVICES else 49_000  # of tokens; small models have fewer
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
COMM_CHARS = 15  # of a name, as the kernel has it
OURS = ("requests", "copies", "index")
GROUPS = ("main", *OURS, "grpc", "other")
HALVES = ("scheduler", "worker")  # of a connector


class Thread(NamedTuple):
    process: int
    number: int
    name: str


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    url: str
    process: int
    hooks: Path | None = None  # where its hooks' times are, "-scheduler" or "-worker" behind it

    @staticmethod
    def of(word: str) -> Server:
        """NAME=URL,PID; ValueError."""
        name, _, rest = word.partition("=")
        url, _, process = rest.rpartition(",")
        if not (name and url.startswith("http")):
            raise ValueError(f"{word!r} is not NAME=URL,PID")
        return Server(name, url, int(process))

    def engine_core(self) -> dict[Thread, float]:
        """CPU time so far by thread, of the processes below this one, which serves the API."""
        return {thread: ms for process in descendants(self.process)[1:] for thread, ms in thread_ms(process).items()}

    def hook_ms(self) -> float:
        """CPU time of the connector's hooks so far, of all steps but the last."""
        halves = [self.hooks.with_name(f"{self.hooks.name}-{half}") for half in HALVES] if self.hooks else []
        return sum(step.hooks * 1000 for half in halves for step in read_steps(half))


@dataclass(slots=True)
class Cell:
    """One server under one load."""

    ttft_ms: list[float] = field(default_factory=list)  # of turns 2 and later
    per_second: list[float] = field(default_factory=list)  # of each round, turns 2 and later
    cpu_ms: Counter[str] = field(default_factory=Counter)  # by group of threads, all turns; "hooks": of main's
    requests: int = 0

    def each(self, group: str) -> float:
        return self.cpu_ms[group] / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Chats:
    count: int
    first: int
    more: int
    turns: int

    def prompts(self) -> list[list[list[int]]]:
        """Token ids of each turn of each chat, no two alike."""
        ids = random.Random(secrets.randbits(64))
        made = []
        for _ in range(self.count):
            whole = [ids.randrange(1000, TOP_ID) for _ in range(self.first + (self.turns - 1) * self.more)]
            made.append([whole[: self.first + turn * self.more] for turn in range(self.turns)])
        return made


def descendants(process: int) -> list[int]:
    found = [process]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def thread_ms(process: int) -> dict[Thread, float]:
    found: dict[Thread, float] = {}
    for task in Path(f"/proc/{process}/task").glob("*"):
        try:
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
            found[Thread(process, int(task.name), name)] = exact_ms(task) or ticks_ms(fields.split())
        except (FileNotFoundError, ProcessLookupError):  # it ended
            continue
    return found


def exact_ms(task: Path) -> float:
    """CPU time to the nanosecond; 0: the kernel does not count it."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e6
    except FileNotFoundError:
        return 0.0


def ticks_ms(fields: list[str]) -> float:
    """User's and system's of a `stat`, behind the name."""
    return (int(fields[11]) + int(fields[12])) * TICK_MS


def group_of(thread: Thread) -> str:
    if thread.number == thread.process:
        return "main"
    ours = next((group for group in OURS if thread.name.startswith(f"kvferry {group}"[:COMM_CHARS])), None)
    return ours or ("grpc" if "grpc" in thread.name or "event_eng" in thread.name else "other")


def body_of(prompt: list[int], **more: object) -> bytes:
    asked = {"temperature": 0, "ignore_eos": True, "prompt": prompt, **more}
    return json.dumps(asked).encode()


async def ask(client: httpx.AsyncClient, url: str, body: bytes) -> float:
    """Seconds to the first event with a token; the answer is read to its end. RuntimeError."""
    began, first = time.perf_counter(), 0.0
    headers = {"Content-Type": "application/json"}
    async with client.stream("POST", url + "/v1/completions", content=body, headers=headers) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{url}: {response.status_code} {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not first and line.startswith("data: {") and '"choices"' in line:
                first = time.perf_counter() - began
    return first


async def ask_pair(client: httpx.AsyncClient, pair: list[Server], bodies: tuple[bytes, bytes]) -> float:
    """Both halves at once; seconds to decode's first token."""
    prefill = asyncio.create_task(ask(client, pair[0].url, bodies[0]))
    try:
        return await ask(client, pair[1].url, bodies[1])
    finally:
        await prefill


def bodies_of(prompt: list[int], output: int) -> tuple[bytes, bytes]:
    name = secrets.token_hex(16)
    to_prefill = {"do_remote_decode": True, "kvferry_request": name}
    to_decode = {"do_remote_prefill": True, "kvferry_request": name, "kvferry_prefill": "prefill"}
    return (
        body_of(prompt, max_tokens=1, stream=True, kv_transfer_params=to_prefill),
        body_of(prompt, max_tokens=output, stream=True, kv_transfer_params=to_decode),
    )


async def drive(client: httpx.AsyncClient, servers: list[Server], load: Chats, output: int, cells: list[Cell]) -> None:
    """One round on one server, or on a pair. A cell for each server."""
    pair = len(servers) == 2
    chats = [
        [bodies_of(p, output) if pair else (body_of(p, max_tokens=1, stream=True),) for p in chat]
        for chat in load.prompts()
    ]
    before = [(server.engine_core(), server.hook_ms()) for server in servers]
    began = 0.0
    for turn in range(load.turns):
        began = began or (time.perf_counter() if turn else 0.0)
        times = await asyncio.gather(
            *(
                ask_pair(client, servers, (chat[turn][0], chat[turn][-1]))
                if pair
                else ask(client, servers[0].url, chat[turn][0])
                for chat in chats
            )
        )
        if turn:
            cells[-1].ttft_ms += [seconds * 1000 for seconds in times]
    cells[-1].per_second.append(load.count * (load.turns - 1) / (time.perf_counter() - began))
    for server, (was, hooks), cell in zip(servers, before, cells, strict=True):
        if server.hooks is not None:
            cell.cpu_ms["hooks"] += server.hook_ms() - hooks
        for thread, spent in server.engine_core().items():
            cell.cpu_ms[group_of(thread)] += spent - was.get(thread, 0.0)
        cell.requests += load.count * load.turns


async def measure(systems: list[list[Server]], load: Chats, args: argparse.Namespace) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    async with new_client() as client:
        for number in range(args.rounds + 1):
            for servers in systems if number % 2 else systems[::-1]:
                own = [cells.setdefault(server.name, Cell()) if number else Cell() for server in servers]
                await drive(client, servers, load, args.tokens_out, own)
    return cells


@contextmanager
def started(args: argparse.Namespace) -> Iterator[list[list[Server]]]:
    """One server alone, the prefill server of a pair asked without transfer parameters, and the pair."""
    if "VLLM_MODEL" not in os.environ:
        os.environ["VLLM_MODEL"] = str(model_of_heads())
    longest = args.first + (args.turns - 1) * args.more + args.tokens_out
    most = -(-longest // 1024) * 1024
    room = ("--max-model-len", str(most), "--hf-overrides", json.dumps({"max_position_embeddings": most}))
    room += ("--max-num-batched-tokens", "2048")
    spec = Spec(
        flags=(*SMALL, *room),
        decode_flags=SCHEDULER,
        page_size=64,
        pool=args.pool,
        pool_bytes="2GiB",
        host_bytes=args.host_bytes,
        extra={"deadline_seconds": 120.0, **({"revision": args.revision} if args.revision else {})},
    )
    timed = replace(spec, connector_class=TIMED_CONNECTOR) if args.hooks else spec
    with tempfile.TemporaryDirectory() as folder, Cluster(timed) as cluster:
        os.environ |= {"HOOK_TIMES": folder, "HOOK_ALWAYS": "1"}  # a connector without a clock reads neither
        if not args.pair_alone:
            cluster.alone()
        cluster.kvferry()

        def server(name: str, engine: Engine, role: str = "") -> Server:
            return Server(name, engine.url, engine.popen.pid, Path(folder, role) if args.hooks and role else None)

        prefill, decode = (cluster.engines[name] for name in ("prefill", "decode"))
        pair = [server("prefill, handed over", prefill, "kv_producer"), server("decode", decode, "kv_consumer")]
        alone = cluster.engines.get("alone")
        plain = server("kvferry", prefill, "kv_producer")
        yield [[server("none", alone)], [plain], pair] if alone else [pair]


def table(title: str, cells: dict[str, Cell]) -> Table:
    shown = Table(title=title)
    for name in (
        "server",
        "requests",
        "TTFT p50 ms",
        "requests/s (each round)",
        "core: ms a request",
        *GROUPS,
        "hooks",
        "kvferry",
    ):
        shown.add_column(name, justify="left" if name == "server" else "right")
    for name, cell in cells.items():
        ttft = f"{statistics.median(cell.ttft_ms):.1f}" if cell.ttft_ms else "-"
        rate = (
            f"{statistics.median(cell.per_second):.1f} ({', '.join(f'{r:.1f}' for r in cell.per_second)})"
            if cell.per_second
            else "-"
        )
        groups = [cell.each(group) for group in GROUPS]
        times = [f"{each:.2f}" for each in (sum(groups), *groups)]
        both = ["-", "-"]
        if "hooks" in cell.cpu_ms:
            both = [f"{each:.2f}" for each in (cell.each("hooks"), sum(map(cell.each, (*OURS, "hooks"))))]
        shown.add_row(name, str(cell.requests), ttft, rate, *times, *both)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="append", type=Server.of, default=[], metavar="NAME=URL,PID")
    parser.add_argument("--pair", nargs=2, type=Server.of, metavar="NAME=URL,PID", help="prefill, decode")
    parser.add_argument("--start", action="store_true", help="the servers, on CPUs or VLLM_DEVICES")
    parser.add_argument("--hooks", action="store_true", help="with --start: their times, too")
    parser.add_argument("--pair-alone", action="store_true", help="with --start: no server without kvferry")
    parser.add_argument("--pool", choices=("daemon", "engine"), default="daemon", help="with --start, on GPUs")
    parser.add_argument("--host-bytes", default="1GiB", help="with --start, of decode's daemon")
    parser.add_argument("--revision", help="with --start, of weights that are no files")
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 32], metavar="N")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--first", type=int, default=8192, metavar="TOKENS")
    parser.add_argument("--more", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens-out", type=int, default=16)
    parser.add_argument("--output")
    args = parser.parse_args()
    systems = [[server] for server in args.plain] + ([args.pair] if args.pair else [])
    if bool(systems) is args.start:
        parser.error("one of --start, and of --plain and --pair, must be given")
    console = Console(record=True, width=170)
    vllm = f"; vLLM {version_of(PYTHON)}{'' if DEVICES else ' for CPUs'}" if args.start else ""
    told = f"chats of {args.first} tokens and {args.more} more in each of {args.turns - 1} turns"
    console.print(f"{machine()}{vllm}; {told}")
    with started(args) if args.start else nullcontext(systems) as asked:
        for count in args.at_once:
            load = Chats(count, args.first, args.more, args.turns)
            console.print(table(f"{count} at a time", asyncio.run(measure(asked, load, args))))
    if args.output:
        Path(args.output).write_text(console.export_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
