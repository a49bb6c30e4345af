"""vLLM as it is compiled, on GPUs: one alone, a pair with its own NixlConnector, and a pair joined by kvferry, by way
of its daemons' pools ("kvferry") or straight from block to block ("blocks"); "first" and "first-blocks" are these with
replies that begin with the prefill server's first token, and "at-once" the latter with a front end that streams it as
soon as prefill answers (--first-token prefill), "back" the same with --way-back auto. Each is behind kvferry's front
end, with the same flags and the same load. "offload" is NixlConnector with vLLM's OffloadingConnector beside it at
decode, with as much host memory as kvferry's host tier: where there is one, `--decode-cache host`.

VLLM_DEVICES=cuda:0,cuda:1 python bench/vllm/gpu_compare.py run --output build/part.json [--at-once 1 4 32 64] \\
    [--tokens-out 16 128] [--decode-cache all half third host] [--visits 2]
    [--systems alone nixl offload kvferry blocks first first-blocks at-once back] [--ranks 2:2]
python bench/vllm/gpu_compare.py table build/*.json --output bench/results/gpu_compare.txt

With `--equal-memory` an engine whose daemon has no pool has its bytes in blocks, and with `--daemon-memory` one without
a daemon has what a daemon takes of the GPU besides; tables do not tell such rows apart.

Systems are started one after the other, and the other way round on every second visit, so that each has the GPUs to
itself and none is always the first. With `--together`, where GPU memory has room for them, all are up at once and idle
but for the one that is asked: they differ less in what the machine does meanwhile. `--decode-cache`: the share of one
round's tokens that the decode engine's blocks hold; `host` is a third, and kvferry's host tier. The working set is that
of the largest `--at-once` of a call, or of its `--population`: so many chats take turns, `--at-once` of them at a time.
Cells are measured in each of `--states`: with young caches, when twice as many tokens as they hold have passed
(wrapped), and where prefill's engine forgets all before each turn (cold). A run is appended to `--output`; a call may
hold any part of the cells.

Behind each cell's table stands where the milliseconds to the first token are, in the mean: rows follow each other and
sum to TTFT. "front end" is what is outside of the servers, the servers' own are what is neither queue nor steps;
"hand-off" is what decode's load takes beyond prefill's queue and steps, and below it is what the daemons say of parts
and requests. Without VLLM_DEVICES the servers are vLLM's for CPUs (VLLM_FLAGS=--enforce-eager), for that table alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gpu_tables
import httpx
import psutil
from cluster import DEVICES, SCHEDULER, Cluster, Spec, machine, model_folder, ranks_of
from engine_threads import descendants
from gpu_tables import AT_ONCE, SYSTEMS, Key
from gpu_turns import Measured, Shape, drive, median, nothing, settled
from rank_devices import devices_of
from rich.console import Console

from kvferry.daemon.config.values import parse_size

STATES = ("young", "wrapped", "cold")
SHARES = {"all": 1.1, "half": 0.5, "third": 1 / 3, "host": 1 / 3}
WRAP_AT_ONCE = 32
FORGET_TRIES = 20
DAEMONLESS = ("alone", "nixl", "offload")
POOLED = ("kvferry", "first")  # their daemons have pools of their own
FLAGS = ("--dtype", "bfloat16", "--max-num-seqs", "64")


def token_bytes(model: Path) -> int:
    """Of KV in bfloat16, by the model's config.json."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * size * 2)


def working_tokens(args: argparse.Namespace) -> int:
    """Of the largest working set of the call."""
    return max(*args.at_once, args.population) * Shape(args.first, args.more, args.turns, max(args.tokens_out)).tokens


def check_room(args: argparse.Namespace, cache: str) -> None:
    """ValueError where vLLM would not start: its blocks are to hold one prompt of the longest."""
    held = int(SHARES[cache] * working_tokens(args))
    if held < args.max_model_len:
        raise ValueError(
            f"--max-model-len is {args.max_model_len}; the blocks of --decode-cache {cache} hold {held} tokens: a "
            "smaller one, or more --at-once"
        )


def spec_of(args: argparse.Namespace, cache: str, each_token: int) -> Spec:
    working = working_tokens(args) * each_token
    flags = (*FLAGS, "--max-model-len", str(args.max_model_len), "--load-format", args.load_format)
    return Spec(
        decode_bytes=int(SHARES[cache] * working),
        prefill_bytes=int(SHARES["all"] * working),
        flags=flags,
        page_size=args.page_size,
        pool_bytes=args.pool_bytes,
        host_bytes=str(working) if cache == "host" else "0",
        extra={"revision": "bench"} if args.load_format == "dummy" else {},
        ranks=ranks_of(args.ranks),
    )


def spec_for(system: str, spec: Spec) -> Spec:
    if system.startswith("first") or system in AT_ONCE:
        spec = replace(spec, decode_flags=SCHEDULER)
    if system in AT_ONCE:
        back = ("--way-back", "auto") if system == "back" else ()
        return replace(spec, pool="engine", first_token="prefill", daemon_flags=back)
    if system.endswith("blocks"):
        return replace(spec, pool="engine")
    if system == "offload":
        kept = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        config = {"cpu_bytes_to_use": int(spec.host_bytes)}
        return replace(spec, beside={"decode": ({**kept, "kv_connector_extra_config": config},)})
    return spec


def with_more(spec: Spec, nbytes: int) -> Spec:
    """With so much more memory for both engines' blocks."""
    return replace(spec, decode_bytes=spec.decode_bytes + nbytes, prefill_bytes=spec.prefill_bytes + nbytes)


def start(cluster: Cluster, system: str) -> str:
    """The front end's URL."""
    if system == "alone":
        cluster.alone()
        cluster.start_front()
    elif system in ("nixl", "offload"):
        cluster.nixl()
        cluster.start_nixl_front()
    else:
        cluster.kvferry()
    return cluster.front


def gpu_memory(cluster: Cluster) -> dict[str, int]:
    """MiB of each process's GPU memory, by what it is."""
    if not DEVICES:
        return {}
    told = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    used: Counter[int] = Counter()  # a process has a line for each GPU
    for line in filter(str.strip, told.splitlines()):
        process, mib = map(int, line.split(","))
        used[process] += mib
    return {name: sum(used[process] for process in every) for name, every in processes(cluster).items()}


def processes(cluster: Cluster) -> dict[str, list[int]]:
    """Those of each engine and daemon, by what it is."""
    tops = {name: engine.popen.pid for name, engine in cluster.engines.items() if name != "front"}
    tops |= {f"{name} daemon": daemon.popen.pid for name, daemon in cluster.daemons.items()}
    return {name: descendants(top) for name, top in tops.items()}


def cpu_seconds(cluster: Cluster) -> dict[str, float]:
    """So far, of the processes that live."""
    found = dict.fromkeys(processes(cluster), 0.0)
    for name, every in processes(cluster).items():
        for process in every:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(process).cpu_times()
                found[name] += times.user + times.system
    return found


def warm(cluster: Cluster, url: str, output: int) -> None:
    """Connections, handshakes and kernels of the first time."""
    asyncio.run(drive(cluster, url, 4, Shape(1024, 512, 3, output), 2))


def wrap(cluster: Cluster, url: str, spec: Spec, args: argparse.Namespace, each_token: int) -> None:
    rounds = -(-2 * spec.prefill_bytes // (each_token * WRAP_AT_ONCE * args.first))
    asyncio.run(drive(cluster, url, WRAP_AT_ONCE, Shape(args.first, args.more, 1, 1), rounds))


class Running:
    """A system that is up."""

    def __init__(self, system: str, spec: Spec, cluster: Cluster) -> None:
        self.system = system
        self.spec = spec
        self.cluster = cluster
        self.url = start(cluster, system)

    async def forget(self, client: httpx.AsyncClient) -> None:
        """Empties the cache of the engine that computes prompts. RuntimeError."""
        name = "alone" if self.system == "alone" else "prefill"
        for _ in range(FORGET_TRIES):  # vLLM refuses while a block is still held
            await settled()
            answer = await client.post(self.cluster.engines[name].url + "/reset_prefix_cache")
            if answer.status_code == httpx.codes.OK and answer.json() == {"success": True}:
                return
        raise RuntimeError(f"{self.system}: {name}'s cache is not empty: {answer.status_code} {answer.text}")

    def cell(self, key: Key, args: argparse.Namespace) -> dict[str, Any]:
        """Measured once, as a row."""
        rounds = max(1, round(args.requests / (key.chats * (args.turns - 1))))
        shape = Shape(args.first, args.more, args.turns, key.output)
        before, began = cpu_seconds(self.cluster), time.monotonic()
        between = self.forget if key.state == "cold" else nothing
        got = asyncio.run(drive(self.cluster, self.url, key.at_once, shape, rounds, between, key.chats))
        seconds = time.monotonic() - began
        cores = {name: (each - before.get(name, 0)) / seconds for name, each in cpu_seconds(self.cluster).items()}
        row = {"system": self.system, "key": asdict(key), "got": asdict(got)}
        return {**row, "memory": gpu_memory(self.cluster), "cores": cores}


@contextlib.contextmanager
def up(systems: Sequence[str], spec: Spec, args: argparse.Namespace, console: Console) -> Iterator[list[Running]]:
    """Systems that are started and warm."""
    with contextlib.ExitStack() as stack:
        there = []
        for system in systems:
            began = time.monotonic()
            own = spec_for(system, spec)
            if args.equal_memory and system not in POOLED:
                own = with_more(own, parse_size(args.pool_bytes))
            if system in DAEMONLESS:
                own = with_more(own, parse_size(args.daemon_memory))
            each = Running(system, own, stack.enter_context(Cluster(own)))
            console.print(f"{system}: up in {time.monotonic() - began:.0f} s")
            warm(each.cluster, each.url, min(args.tokens_out))
            there.append(each)
        yield there


def measure(there: list[Running], cache: str, args: argparse.Namespace, console: Console, visits: int) -> None:
    """The cells of systems that are up, which are asked by turns; each row is kept as it comes."""
    each_token = token_bytes(model_folder())
    for state in args.states:
        if state == "wrapped":
            for each in there:
                wrap(each.cluster, each.url, each.spec, args, each_token)
        for at_once in args.at_once:
            for output in args.tokens_out:
                key = Key(cache, state, at_once, output, args.ranks, args.population)
                for number in range(visits):
                    for each in there if number % 2 == 0 else there[::-1]:
                        row = each.cell(key, args)
                        keep(args, row)
                        got = Measured.of(row["got"])
                        told = f"TTFT {median(got.ttft_ms):.1f} ms, {median(got.per_second):.2f}/s"
                        console.print(f"{each.system}, {key}: {told}")


def run(args: argparse.Namespace) -> int:
    console = Console(width=170)
    if "cold" in args.states:
        os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    if "offload" in args.systems and args.decode_cache != ["host"]:
        print(f"--systems has offload, --decode-cache is {args.decode_cache}; it must be host")
        return 2
    for cache in args.decode_cache:
        spec = spec_of(args, cache, token_bytes(model_folder()))
        if args.together:
            with up(args.systems, spec, args, console) as there:
                measure(there, cache, args, console, args.visits)
            continue
        for number in range(args.visits):
            for system in args.systems if number % 2 == 0 else args.systems[::-1]:
                with up([system], spec, args, console) as there:
                    measure(there, cache, args, console, 1)
    return 0


def keep(args: argparse.Namespace, row: dict[str, Any]) -> None:
    head = {"machine": f"{gpus()}, {machine()}", "devices": DEVICES, "shape": {**vars(args), "go": ""}, "rows": [row]}
    with Path(args.output).open("a") as file:
        file.write(json.dumps({**head, "model": model_told(model_folder()), "places": places(args.ranks)}) + "\n")


def model_told(model: Path) -> str:
    config = json.loads((model / "config.json").read_text())
    return f"{model.name}: {config['architectures'][0]}, {config['num_hidden_layers']} layers"


def places(ranks: str) -> str:
    if not DEVICES:
        return f"ranks {ranks}"
    prefill, decode = devices_of(DEVICES, *map(int, ranks.split(":")))
    return f"ranks {ranks}: prefill on {', '.join(prefill)}, decode on {', '.join(decode)}"


def gpus() -> str:
    if not DEVICES:
        return "no GPU"
    names = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return " and ".join(names.stdout.split("\n")[:-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True)
    runs = modes.add_parser("run")
    runs.set_defaults(go=run)
    runs.add_argument("--output", required=True, metavar="FILE")
    runs.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[each for each in SYSTEMS if each != "offload"])
    runs.add_argument("--at-once", nargs="+", type=int, default=[1, 4, 32, 64], metavar="N")
    runs.add_argument("--tokens-out", nargs="+", type=int, default=[16, 128], metavar="N")
    runs.add_argument("--decode-cache", nargs="+", choices=tuple(SHARES), default=["all"])
    runs.add_argument("--ranks", default="1:1", metavar="P:D", help="tensor-parallel, of prefill and of decode")
    runs.add_argument("--population", type=int, default=0, metavar="CHATS", help="of a round; 0: those asked at a time")
    runs.add_argument("--visits", type=int, default=2, help="of each system")
    runs.add_argument("--requests", type=int, default=200, help="of a cell, in each visit, about")
    runs.add_argument("--states", nargs="+", choices=STATES, default=["young"], help="of the caches")
    runs.add_argument("--together", action="store_true", help="all systems are up at once, and asked by turns")
    runs.add_argument("--first", type=int, default=8192, metavar="TOKENS")
    runs.add_argument("--more", type=int, default=512, metavar="TOKENS")
    runs.add_argument("--turns", type=int, default=6)
    runs.add_argument("--max-model-len", type=int, default=16384, metavar="TOKENS")
    runs.add_argument("--page-size", type=int, default=64, metavar="TOKENS")
    runs.add_argument("--pool-bytes", default="8GiB", help="of each daemon")
    runs.add_argument("--equal-memory", action="store_true", help="a pool's bytes are blocks where there is no pool")
    runs.add_argument("--daemon-memory", default="0", help="blocks of systems without daemons have so much more")
    runs.add_argument("--load-format", default=os.environ.get("VLLM_LOAD", "dummy"))
    tables = modes.add_parser("table")
    tables.set_defaults(go=gpu_tables.write_table)
    tables.add_argument("files", nargs="+", metavar="FILE")
    tables.add_argument("--output")
    args = parser.parse_args()
    if args.go is run:
        try:
            for cache in args.decode_cache:
                check_room(args, cache)
        except ValueError as error:
            runs.error(str(error))
    return int(args.go(args))


if __name__ == "__main__":
    raise SystemExit(main())
