"""Runs AIPerf's multi-turn profile against a front end and shows its numbers beside the daemons' own.

    bash bench/aiperf.sh                                                 # a system of synthetic workers, started here
    bash bench/aiperf.sh --url http://HOST:8000 --stats HOST:7070 --tokenizer /models/mine

The tokenizer is a local folder (AIPerf needs one to make prompts and to count tokens); by default that of the
demonstration's model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.cli.system import SystemSpec, start_system
from kvferry.loadgen.client import Client
from kvferry.proto import cache_pb2, common_pb2

LIMIT_S = 540.0
METRICS = (
    "request_count",
    "error_request_count",
    "request_throughput",
    "time_to_first_token",
    "inter_token_latency",
    "request_latency",
    "input_sequence_length",
    "output_sequence_length",
    "usage_prompt_cache_read_tokens",
)


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    stats: str  # a decode daemon; "": none is asked


@contextmanager
def server(given: argparse.Namespace) -> Iterator[Server]:
    if given.url is not None:
        yield Server(given.url, given.stats)
        return
    spec = SystemSpec(
        page_size=16,
        worker_flags=["--synthetic-prefill-us", "5", "--synthetic-decode-us", "200"],
        front_flags=["--model-name", "synthetic"],
    )
    with Stack() as stack:
        system = start_system(stack, spec)
        yield Server(system.url, system.decodes[0].daemon_address)


def decode_side(address: str) -> cache_pb2.SideStats:
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        return next(side for side in fetch(channel).sides if side.role == common_pb2.ROLE_DECODE)


def profile(given: argparse.Namespace, target: Server, folder: str) -> int:
    words = [given.aiperf, "profile", "--model", given.model, "--url", target.url, "--endpoint-type", "chat"]
    words += [
        "--streaming",
        "--use-server-token-count",
        "--tokenizer",
        given.tokenizer,
        "--concurrency",
        str(given.concurrency),
    ]
    words += ["--conversation-num", str(given.conversations), "--conversation-turn-mean", str(given.turns)]
    words += ["--conversation-turn-stddev", "0", "--synthetic-input-tokens-mean", str(given.user_tokens)]
    words += ["--synthetic-input-tokens-stddev", "0", "--output-tokens-mean", str(given.output_tokens)]
    words += ["--output-tokens-stddev", "0", "--extra-inputs", "ignore_eos:true", "--random-seed", "1"]
    words += ["--ui-type", "none", "--artifact-dir", folder, "--no-auto-plot", *given.more]
    environment = {**os.environ, "NO_PROXY": "*"}
    return subprocess.run(words, env=environment, timeout=LIMIT_S, check=False).returncode


def show(folder: str) -> int:
    """Prints AIPerf's own numbers; returns its errors."""
    found = next(iter(Path(folder).rglob("profile_export_aiperf.json")), None)
    if found is None:
        print(f"aiperf left no profile_export_aiperf.json in {folder}", file=sys.stderr)
        return 1
    records = json.loads(found.read_text())
    print(f"\n{'AIPerf':<34} {'avg':>12} {'p50':>12} {'p99':>12}")
    for name in METRICS:
        if isinstance(values := records.get(name), dict):
            numbers = (values.get(key) for key in ("avg", "p50", "p99"))
            cells = ["" if number is None else f"{number:,.1f}" for number in numbers]
            unit = values.get("unit", "")
            print(f"{f'{name}, {unit}':<34} {cells[0]:>12} {cells[1]:>12} {cells[2]:>12}".rstrip())
    errors = records.get("error_request_count") or {}
    return int(errors.get("avg") or 0) if isinstance(errors, dict) else 0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", required=True, metavar="PROGRAM")
    parser.add_argument("--url", help="default: a system of synthetic workers, started and ended here")
    parser.add_argument("--stats", default="", metavar="HOST:PORT", help="with --url: a decode daemon")
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument("--tokenizer", metavar="FOLDER")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--user-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("more", nargs="*", help="more flags of aiperf, behind --")
    given = parser.parse_args(words)
    if given.tokenizer is None:
        from kvferry.workers.smollm import converted_model

        given.tokenizer = str(converted_model())
    with server(given) as target, tempfile.TemporaryDirectory() as folder:
        if given.model is None:
            given.model = model_of(target.url)
        status = profile(given, target, folder)
        errors = show(folder)
        if target.stats:
            side = decode_side(target.stats)
            hits, queried = side.requests.hit_tokens, side.requests.queried_tokens
            print(f"{'the daemon: finished':<34} {side.requests.finished:>12,}")
            print(f"{'the daemon: prompt tokens matched':<34} {hits:>12,} ({hits / max(1, queried):.1%})")
    return 1 if status or errors else 0


def model_of(url: str) -> str:
    async def ask() -> str:
        async with Client(url, connections=1, timeout_s=10) as client:
            return (await client.model()).name

    return asyncio.run(ask())


if __name__ == "__main__":
    sys.exit(main())
