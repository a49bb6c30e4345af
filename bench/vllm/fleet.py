"""Prefill engines and one decode engine, or more, under prompts with shared prefixes: the workload that SGLang
published for its decode radix cache (three prefill servers and one decode server, 1,000 requests of a shared prefix of
50,000 tokens and 4,500 of their own, 200 tokens out), behind kvferry's front end. With --turns each request is a chat,
whose next turn may go to any prefill engine.

VLLM_DEVICES=cuda:0,cuda:1,cuda:2,cuda:3 python bench/vllm/fleet.py run --output build/fleet.json
    [--systems nixl-cold nixl kvferry kvferry-back] [--prefills 3] [--decodes 1] [--requests 1000] [--turns 1]
    [--at-once 56] [--prefixes 10]
    [--decode-tokens 819200] [--prefill-tokens 819200]
python bench/vllm/fleet.py table build/fleet.json --output bench/results/gpu_fleet.txt

nixl-cold     NixlConnector, and decode keeps nothing: it reads all of each prompt
nixl          NixlConnector
kvferry       from block to block, replies that begin with prefill's first token
kvferry-back  the same with --way-back auto: what a prefill engine lacks it fetches from decode

Caches are cold at the start, and each system's engines are new; each gets the same prompts in the same order. The front
end gives a prompt to the prefill engine with the least to do, whatever it holds. `--at-once` requests run at any time,
the next one begins when one has ended. A decode engine that keeps prefixes needs `--prefixes` of them and the rest of
`--at-once` prompts in its blocks; `run` refuses what does not fit. Without VLLM_DEVICES vLLM for CPUs takes a small
model: give it small numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import httpx
from cluster import BLOCK, DEVICES, SCHEDULER, SMALL, Cluster, Spec, model_folder
from gpu_compare import FLAGS, gpu_memory, gpus, machine, start, token_bytes, warm
from gpu_turns import Answer, ask, body_of, fresh, growth, median, put, said, settled
from rich.console import Console
from rich.table import Table

SYSTEMS = ("nixl-cold", "nixl", "kvferry", "kvferry-back")
SEED = 11
DEADLINE_SECONDS = 600  # of a prompt, until its pages are there
SAMPLE_SECONDS = 2.0
TOP_ID_OF_SMOL = 49_000  # of tokens
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Load:
    prefixes: int
    prefix: int  # tokens that prompts share
    own: int  # tokens that one alone has
    output: int
    at_once: int
    requests: int
    turns: int = 1  # of each of them, which then are chats: a turn has what was answered, and as much of its own again
    decodes: int = 1  # engines, to one of which each prefix goes

    @property
    def longest(self) -> int:
        return self.prefix + self.turns * (self.own + self.output)

    @property
    def shared_tokens(self) -> int:
        """Of KV that a decode engine needs which keeps each prefix once."""
        chats = -(-self.at_once // self.decodes)
        return self.prefixes * self.prefix + chats * (self.longest - self.prefix + 2 * BLOCK)

    def prompts(self) -> Iterator[list[int]]:
        ids = random.Random(SEED)
        heads = [self.words(ids, self.prefix) for _ in range(self.prefixes)]
        for _ in range(self.requests):
            yield ids.choice(heads) + self.words(ids, self.own)

    @staticmethod
    def words(ids: random.Random, count: int) -> list[int]:
        return fresh(ids, count)


@dataclass(slots=True)
class Measured:
    """A system under the load. Lists: an entry for each answer, in the order in which they were asked."""

    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)  # what was said
    begun: list[float] = field(default_factory=list)  # seconds from the start
    ended: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)
    told: dict[str, float] = field(default_factory=dict)  # what the servers said
    running: float = 0.0  # decode's, in the mean
    waiting: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)  # bytes by link, as the daemons count them
    nvlink: dict[str, tuple[float, float]] = field(default_factory=dict)  # bytes that a GPU sent and got
    memory: dict[str, int] = field(default_factory=dict)  # MiB of a process's


def spec_of(system: str, args: argparse.Namespace) -> Spec:
    load = load_of(args)
    length = ("--max-model-len", str(-(-(load.longest + 1) // 1024) * 1024))
    if DEVICES:
        each = token_bytes(model_folder())
        room = Spec(decode_bytes=args.decode_tokens * each, prefill_bytes=args.prefill_tokens * each)
        spec = replace(
            room, flags=(*FLAGS, *length, "--load-format", "dummy"), page_size=64, extra={"revision": "bench"}
        )
    else:
        blocks = [tokens // BLOCK for tokens in (args.decode_tokens, args.prefill_tokens)]
        spec = Spec(decode_blocks=blocks[0], prefill_blocks=blocks[1], flags=(*SMALL, *length))
    spec = replace(spec, prefills=args.prefills, decodes=args.decodes, host_bytes="0")
    if system == "nixl-cold":
        return replace(spec, decode_flags=("--no-enable-prefix-caching",))
    if system == "nixl":
        return spec
    back = ("--way-back", "auto") if system == "kvferry-back" else ()
    return replace(
        spec,
        pool="engine" if DEVICES else "daemon",  # blocks of a CPU engine are no other process's
        decode_flags=SCHEDULER,
        daemon_flags=("--transfer-seconds", str(DEADLINE_SECONDS), *back),
        extra={**spec.extra, "deadline_seconds": DEADLINE_SECONDS},
    )


def load_of(args: argparse.Namespace) -> Load:
    shape = (args.prefixes, args.prefix, args.own, args.output_tokens)
    return Load(*shape, args.at_once, args.requests, args.turns, args.decodes)


async def drive(cluster: Cluster, load: Load, seconds: float) -> Measured:
    """seconds: after which no further request begins."""
    got, prompts = Measured(), enumerate(load.prompts())
    answers: list[tuple[float, float, Answer]] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.at_once)
    timeout = httpx.Timeout(float(DEADLINE_SECONDS))
    async with httpx.AsyncClient(timeout=timeout, trust_env=False, limits=limits) as client:

        async def turn(name: str, prompt: list[int]) -> list[int]:
            """The prompt with its answer; nothing where there is none."""
            body, asked = body_of(prompt, load.output), time.perf_counter() - began
            try:
                answer = await ask(client, cluster.front, prompt, body)
            except (RuntimeError, httpx.HTTPError) as error:
                got.failed.append(f"{name}: {type(error).__name__} {error}"[:300])
                return []
            answers.append((asked, time.perf_counter() - began, answer))
            return prompt + answer.ids

        async def asker(until: float) -> None:
            while time.perf_counter() < until and (one := next(prompts, None)):
                number, prompt = one
                own = random.Random(SEED + number)
                for asking in range(load.turns):
                    said_so_far = await turn(f"request {number}, turn {asking + 1}", prompt)
                    if not said_so_far or time.perf_counter() >= until:
                        break
                    prompt = said_so_far + load.words(own, load.own)

        before, sent, links = await said(client, cluster), sent_by_link(cluster), nvlink_bytes()
        sampling = asyncio.create_task(sampled(client, cluster, got))
        began = time.perf_counter()
        try:
            await asyncio.gather(*(asker(began + seconds) for _ in range(load.at_once)))
        finally:
            got.seconds = time.perf_counter() - began
            sampling.cancel()
        await settled()
        got.told = growth(before, await said(client, cluster))
    got.sent = {name: value - sent.get(name, 0.0) for name, value in sent_by_link(cluster).items()}
    got.nvlink = {
        gpu: (out - links[gpu][0], came - links[gpu][1]) for gpu, (out, came) in nvlink_bytes().items() if gpu in links
    }
    for begun, ended, answer in sorted(answers, key=lambda each: each[:2]):
        got.begun.append(begun)
        got.ended.append(ended)
        got.ttft_ms.append(answer.ttft_ms)
        got.between_ms.append(answer.between_ms)
    got.memory = gpu_memory(cluster) if DEVICES else {}
    return got


async def sampled(client: httpx.AsyncClient, cluster: Cluster, got: Measured) -> None:
    """Means, so far, of what decode has running and waiting."""
    count = 0
    while True:
        urls, now = [cluster.engines[name].url for name in cluster.decodes], {}
        text = "\n".join([(await client.get(url + "/metrics")).text for url in urls])
        for name in ("running", "waiting"):
            put(now, name, text, f"vllm:num_requests_{name}")
        count += 1
        got.running += (now.get("running", 0.0) - got.running) / count
        got.waiting += (now.get("waiting", 0.0) - got.waiting) / count
        await asyncio.sleep(SAMPLE_SECONDS)


def sent_by_link(cluster: Cluster) -> dict[str, float]:
    """Bytes that kvferry's daemons have sent, prefill's to decode and back."""
    found: dict[str, float] = {}
    for name in cluster.daemons:
        stats = cluster.stats(name)
        if name.startswith("prefill"):
            found[f"{name} to decode"] = stats.transfers.wire_bytes
            found[f"decode to {name}"] = stats.way_back.transfers.wire_bytes
            found[f"{name} fetched tokens"] = stats.way_back.fetched_tokens
            for choice in stats.way_back.choices:
                found[f"{name} {choice.reason}"] = choice.count
    return found


def nvlink_bytes() -> dict[str, tuple[float, float]]:
    """What each GPU has sent and got over NVLink, as the driver counts; nothing where it does not."""
    if not DEVICES:
        return {}
    told = subprocess.run(["nvidia-smi", "nvlink", "-gt", "d"], capture_output=True, text=True, check=False).stdout
    found: dict[str, tuple[float, float]] = {}
    for gpu, text in re.findall(r"^GPU (\d+):.*\n((?:\s+Link .*\n)*)", told, re.M):
        sent, came = (1024.0 * sum(map(int, re.findall(rf"Data {way}: (\d+) KiB", text))) for way in ("Tx", "Rx"))
        if sent or came:
            found[gpu] = (sent, came)
    return found


def prompt_tokens(cluster: Cluster) -> dict[str, float]:
    """Of prefill engines: all, and those that they have computed themselves."""
    names = {"prompt": "prompt_tokens_total", "computed": "request_prefill_kv_computed_tokens_sum"}
    return {
        name: sum(cluster.metric(engine, f"vllm:{metric}") for engine in cluster.prefills)
        for name, metric in names.items()
    }


def measured(system: str, args: argparse.Namespace, console: Console) -> dict[str, object]:
    began = time.monotonic()
    with Cluster(spec_of(system, args)) as cluster:
        start(cluster, "nixl" if system.startswith("nixl") else "kvferry")
        console.print(f"{system}: up in {time.monotonic() - began:.0f} s")
        if DEVICES:
            warm(cluster, cluster.front, args.output_tokens)
        else:
            asyncio.run(_once(cluster))
        before = prompt_tokens(cluster)
        got = asyncio.run(drive(cluster, load_of(args), args.seconds))
        got.told |= {name: value - before[name] for name, value in prompt_tokens(cluster).items()}
        console.print(
            f"{system}: {len(got.ttft_ms)} in {got.seconds:.0f} s: {per_second(got):.2f}/s, TTFT p50 "
            f"{median(got.ttft_ms) / 1000:.2f} s",
            *got.failed[:5],
            sep="\n",
        )
        return {"system": system, "got": asdict(got)}


async def _once(cluster: Cluster) -> None:
    """Connections, and what a first request makes."""
    ids = random.Random(SEED + 1)
    async with httpx.AsyncClient(timeout=httpx.Timeout(300.0), trust_env=False) as client:
        prompts = [fresh(ids, 4 * BLOCK, TOP_ID_OF_SMOL) for _ in range(2 * cluster.spec.prefills)]
        await asyncio.gather(*(ask(client, cluster.front, prompt, body_of(prompt, 2)) for prompt in prompts))


def run(args: argparse.Namespace) -> int:
    load, console = load_of(args), Console(width=170)
    if load.shared_tokens > args.decode_tokens:
        print(
            f"--decode-tokens is {args.decode_tokens}; {load.prefixes} prefixes and what {load.at_once} prompts have "
            f"of their own are {load.shared_tokens}: fewer --prefixes or --at-once"
        )
        return 2
    if DEVICES and len(DEVICES) < args.prefills + args.decodes:
        print(f"VLLM_DEVICES has {len(DEVICES)}; --prefills is {args.prefills} and --decodes {args.decodes}")
        return 2
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    for system in args.systems:
        row = measured(system, args, console)
        words = {**vars(args), "go": "", "machine": f"{gpus() if DEVICES else 'no GPU'}, {machine()}"}
        with output.open("a") as file:
            file.write(json.dumps({**row, "shape": words}) + "\n")
    return 0


# -- the table

COLUMNS = ("system", "answers", "/s", "/s warm", "TTFT p50 s", "p90", "mean", "later half's p50", "prefill mean s")
COLUMNS += ("between ms", "decode runs", "waits", "GiB to decode", "GiB back", "tokens computed by prefill")
STAGES_TOLD = ("P queue", "P prefill", "D queue", "D prefill", "NIXL read", "NIXL post")
STAGES_TOLD += ("gather", "write", "scatter", "admission", "pages")


def table(args: argparse.Namespace) -> int:
    rows = [json.loads(line) for name in args.files for line in Path(name).read_text().splitlines()]
    console = Console(record=True, width=200)
    for load in sorted({shape_of(row) for row in rows}):
        of = [(row["system"], Measured(**row["got"])) for row in rows if shape_of(row) == load]
        of.sort(key=lambda each: SYSTEMS.index(each[0]))
        shown = Table(title=load)
        for name in COLUMNS:
            shown.add_column(name, justify="left" if name == "system" else "right")
        for system, got in of:
            shown.add_row(system, *cells_of(got))
        console.print(shown)
        for system, got in of:
            console.print(details(system, got), soft_wrap=True)
        console.print(*ratios(dict(of)), sep="\n")
    if args.output:
        Path(args.output).write_text(console.export_text())
    return 0


def shape_of(row: dict[str, dict[str, object]]) -> str:
    of = row["shape"]
    return (
        f"{of['machine']}\n{of['prefills']} prefill + {of.get('decodes', 1)} decode; {of['requests']} requests"
        f"{turns_told(of.get('turns', 1))}, {of['at_once']} at a time, of {of['prefixes']} prefixes of {of['prefix']} "
        f"tokens and {of['own']} of their own, {of['output_tokens']} out; KV for {of['decode_tokens']} tokens at "
        f"decode, {of['prefill_tokens']} at each prefill engine; caches cold at the start"
    )


def turns_told(turns: int) -> str:
    return "" if turns == 1 else f" of {turns} turns"


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values) or [float("nan")]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def cells_of(got: Measured) -> list[str]:
    ttft, told = [value / 1000 for value in got.ttft_ms], got.told
    loads = told.get("NIXL failed", 0) + told.get("kvferry failed", 0)
    back = sum(value for name, value in got.sent.items() if name.startswith("decode to"))
    moved = told.get("NIXL bytes", 0) + sum(value for name, value in got.sent.items() if name.endswith("to decode"))
    return [
        f"{len(ttft)}"
        + (f", {len(got.failed)} FAILED" if got.failed else "")
        + (f" ({loads:.0f} loads FAILED)" if loads else ""),
        f"{per_second(got):.2f}",
        f"{warm_per_second(got):.2f}",
        f"{median(ttft):.2f}",
        f"{percentile(ttft, 0.9):.2f}",
        f"{sum(ttft) / max(1, len(ttft)):.2f}",
        f"{median(ttft[len(ttft) // 2 :]):.2f}",
        f"{told.get('P e2e', float('nan')) / 1000:.2f}",
        f"{median(got.between_ms):.1f}",
        f"{got.running:.1f}",
        f"{got.waiting:.1f}",
        f"{moved / GIB:.1f}",
        f"{back / GIB:.1f}",
        f"{told['computed']:,.0f} of {told['prompt']:,.0f}" if "computed" in told else "-",
    ]


def details(system: str, got: Measured) -> str:
    links = [f"{name} {value / GIB:.1f} GiB" for name, value in got.sent.items() if " to " in name and value]
    counted = [f"GPU {gpu} {sent / GIB:.1f} out, {came / GIB:.1f} in" for gpu, (sent, came) in got.nvlink.items()]
    choices = [f"{name} {value:.0f}" for name, value in got.sent.items() if " to " not in name and value]
    hits = [f"{told:,.0f} tokens"] if (told := got.told.get("D hit tokens")) else []
    stages = [f"{name} {value:.1f}" for name, value in got.told.items() if name in STAGES_TOLD]
    return f"{system}: " + "; ".join(
        f"{what} {', '.join(each)}"
        for what, each in (
            ("links:", links),
            ("NVLink GiB:", counted),
            ("way back:", choices),
            ("decode's engines held", hits),
            ("ms in the mean:", stages),
            ("GPU GiB:", [f"{name} {mib / 1024:.1f}" for name, mib in got.memory.items()]),
        )
        if each
    )


def ratios(systems: dict[str, Measured]) -> Iterator[str]:
    """Of each system to those with NixlConnector."""
    for base in ("nixl-cold", "nixl"):
        for system in SYSTEMS:
            if base in systems and system in systems and SYSTEMS.index(system) > SYSTEMS.index(base):
                one, other = systems[base], systems[system]
                rate, first = per_second(other) / per_second(one), median(one.ttft_ms) / median(other.ttft_ms)
                yield f"{system} to {base}: {rate:.2f} x requests/s, TTFT p50 {first:.1f} x lower"


def per_second(got: Measured) -> float:
    return len(got.ttft_ms) / got.seconds


def warm_per_second(got: Measured) -> float:
    """Answers a second from when the later half began to be asked until the last one was."""
    first, last = got.begun[len(got.begun) // 2], got.begun[-1]
    return sum(first < ended <= last for ended in got.ended) / (last - first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True)
    runs = modes.add_parser("run")
    runs.set_defaults(go=run)
    runs.add_argument("--output", required=True, metavar="FILE")
    runs.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    runs.add_argument("--prefills", type=int, default=3)
    runs.add_argument("--decodes", type=int, default=1)
    runs.add_argument("--requests", type=int, default=1000)
    runs.add_argument("--turns", type=int, default=1, help="of each request, which then is a chat")
    runs.add_argument("--at-once", type=int, default=56)
    runs.add_argument("--prefixes", type=int, default=10)
    runs.add_argument("--prefix", type=int, default=50_000, metavar="TOKENS")
    runs.add_argument("--own", type=int, default=4_500, metavar="TOKENS")
    runs.add_argument("--output-tokens", type=int, default=200, metavar="TOKENS")
    runs.add_argument("--decode-tokens", type=int, default=819_200, help="of KV that fit in decode's blocks")
    runs.add_argument("--prefill-tokens", type=int, default=819_200, help="the same, of each prefill engine")
    runs.add_argument("--seconds", type=float, default=3600.0, help="after which a system gets no further request")
    tables = modes.add_parser("table")
    tables.set_defaults(go=table)
    tables.add_argument("files", nargs="+", metavar="FILE")
    tables.add_argument("--output")
    args = parser.parse_args()
    return int(args.go(args))


if __name__ == "__main__":
    sys.exit(main())
