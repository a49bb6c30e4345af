"""Engines whose caches are reset, as when their weights change: a pair through kvferry, token for token against one
vLLM without a connector. The weights stay as they are, and so must the answers; what is shown is how pages are named.

python bench/vllm/resets.py [--ranks 2:2] [--sleep] [--output FILE]

VLLM_PYTHON says which vLLM, as in cluster.py. Both engines have so few blocks that the daemons beside them keep most of
the chats. --sleep, on GPUs: engines that sleep and are woken, their KV caches taken away meanwhile. vLLM for CPUs has
no sleep mode (`/sleep` is a pause there).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from chaos import leaks
from chat import Comparison, Load, Reply, compared, new_client, run_chats, texts
from cluster import PYTHON, Cluster, Spec, machine, ranks_of
from versions import version_of

SIDES = ("prefill", "decode")
BLOCKS = 34  # of each engine, fewer than the chats take
CHATS = Load(conversations=4, turns=2, user_words=100, max_tokens=16, concurrency=2)
FIRST_TURNS = replace(CHATS, turns=1)
OTHERS = replace(FIRST_TURNS, first=20)
LONG = Load(conversations=2, turns=1, user_words=60, max_tokens=240, first=40)
LIMIT_SECONDS = 240.0  # for the chats of a step
PATIENT: dict[str, object] = {"deadline_seconds": 90.0, "lookup_seconds": 15.0}  # four ranks on few cores are slow
RESET = "/reset_prefix_cache?reset_external=true"
PREEMPTING = f"{RESET}&reset_running_requests=true"
LOADED = "waiting for remote KV transfer"  # vLLM preempts nothing then

Replies = list[list[Reply]]
Beside = Callable[["asyncio.Task[Replies]"], Awaitable[None]]


class Counts(NamedTuple):
    received: int  # pages, by decode
    held: int  # tokens, by the decode daemon
    prefill_held: int  # tokens, by the prefill daemon
    own: int  # tokens that the engines found in their own caches
    failed: int  # loads and pushes

    def __str__(self) -> str:
        held = f"held: {self.held} tokens by its daemon, {self.prefill_held} by prefill's, {self.own} by the engines"
        return f"decode received {self.received} pages; {held}; {self.failed} loads or pushes failed"


def counts(cluster: Cluster) -> Counts:
    prefill, decode = (cluster.stats(name) for name in SIDES)
    names = ("prefix_cache_hits", "kvferry_failed")
    own, failed = (int(sum(cluster.metric(side, f"vllm:{name}_total") for side in SIDES)) for name in names)
    return Counts(decode.transfers.delta_pages, decode.requests.hit_tokens, prefill.requests.hit_tokens, own, failed)


def under_way(cluster: Cluster) -> list[float]:
    """Decode's requests that it computes, those that wait or are loaded, and the tokens that it ever computed."""
    names = ("num_requests_running", "num_requests_waiting", "generation_tokens_total")
    return [cluster.metric("decode", f"vllm:{name}") for name in names]


async def in_time(url: str, load: Load, said: list[list[str]] | None = None) -> Replies:
    return await asyncio.wait_for(run_chats(url, load, said), LIMIT_SECONDS)


class Run:
    """The steps, one after the other, on a pair that is up."""

    def __init__(self, cluster: Cluster, files: dict[str, Path], references: dict[Load, Replies]) -> None:
        self.cluster = cluster
        self.lines: list[str] = []
        self.problems = 0
        self.tokens = 0  # compared
        self._files = files
        self._references = references

    def tell(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True)
        self.lines += lines

    def expect(self, true: object, otherwise: str) -> None:
        if not true:
            self.problems += 1
            self.tell(f"  WRONG: {otherwise}")

    async def ask(self, what: str, load: Load = FIRST_TURNS, beside: Beside | None = None, cut: bool = False) -> Counts:
        """The chats, with what is done beside them; told of once all is at rest. `cut`: answers end early."""
        before = await asyncio.to_thread(counts, self.cluster)
        want = self._references[load]
        task = asyncio.create_task(in_time(self.cluster.front, load, texts(want)))
        got: Replies = []
        try:
            if beside is not None:
                await beside(task)
            got = await task
            if cut:
                self.expect(any(len(turn.tokens) < load.max_tokens for (turn,) in got), "no answer is cut off")
                began = [(a, b) for (a,), (b,) in zip(want, got, strict=True) if b.tokens]
                want = [[replace(a, tokens=a.tokens[: len(b.tokens)])] for a, b in began]
                got = [[b] for _, b in began]
        except (httpx.HTTPError, RuntimeError, TimeoutError) as error:
            task.cancel()
            self.expect(False, f"{what}: {type(error).__name__} {error}")
        comparison = compared(want, got) if got else Comparison()
        found = await asyncio.to_thread(leaks, self.cluster)
        done = Counts(*map(sub, await asyncio.to_thread(counts, self.cluster), before))
        self.tell(f"  {what}: {comparison}; {done}", *comparison.told)
        self.tokens += comparison.tokens
        self.problems += len(comparison.wrong)
        self.expect(not found, "; ".join(found))
        return done

    async def ask_anew(self) -> None:
        """Nothing of before is found, and the pair agrees."""
        done = await self.ask("first turns")
        pages = sum(-(-turn.prompt_tokens // self.cluster.spec.page_size) for (turn,) in self._references[FIRST_TURNS])
        wanted = Counts(received=pages, held=0, prefill_held=0, own=0, failed=0)
        self.expect(done == wanted, f"not as of a pair that is new to these chats, which receives {pages} pages")

    async def ask_apart(self) -> None:
        done = await self.ask("the others, the engines in unlike epochs", OTHERS)
        self.expect(not done.received and done.failed >= OTHERS.conversations, "decode uses what prefill sends")

    async def ask_twice(self) -> None:
        await self.ask("both turns", CHATS)
        done = await self.ask("again", CHATS)
        self.expect(done.held and done.prefill_held and not done.failed, "the daemons do not hold them")

    def name(self, name: str) -> None:
        for path in self._files.values():
            path.write_text(name + "\n")

    async def post(self, side: str, path: str) -> tuple[int, Any]:
        async with new_client() as client:
            answer = await client.post(self.cluster.engines[side].url + path)
        return answer.status_code, answer.json() if answer.content else None

    async def reset(self, name: str, *sides: str) -> None:
        """At rest, one after the other."""
        self.tell(f"{' and '.join(sides)} reset at rest, to {name!r}")
        self.name(name)
        for side in sides:
            answer = await self.post(side, RESET)
            self.expect(answer == (200, {"success": True}), f"{side} answers with {answer}")

    async def sleep(self, side: str) -> None:
        self.expect(await self.post(side, "/sleep?level=1") == (200, None), f"{side} does not go to sleep")

    async def wake(self, side: str) -> None:
        async with new_client() as client:
            asleep = (await client.get(self.cluster.engines[side].url + "/is_sleeping")).json()
        self.expect(asleep == {"is_sleeping": True}, f"{side} does not sleep: {asleep}")
        self.expect(await self.post(side, "/wake_up") == (200, None), f"{side} is not woken")

    async def while_decode_computes(self, name: str, path: str, want: dict[str, object] | None) -> None:
        self.tell(f"POST {path} to decode while it computes, to {name!r}")
        self.name(name)

        async def beside(task: asyncio.Task[Replies]) -> None:
            running, waiting, tokens = await asyncio.to_thread(under_way, self.cluster)
            few = tokens + 8  # behind which both have come
            while not task.done() and (not running or waiting or tokens < few):
                running, waiting, tokens = await asyncio.to_thread(under_way, self.cluster)
            answer = await self.post("decode", path)
            self.expect(running, "decode computed nothing")
            self.tell(f"  it answers with {answer}")
            self.expect(answer == (200, want), f"not with {want}")
            if "keep" in path:
                self.expect(not (await asyncio.wait((task,), timeout=3.0))[0], "decode goes on in the pause")
            if "pause" in path:
                await self.post("decode", "/resume")
            if "sleep" in path:
                await self.wake("decode")

        await self.ask("long answers", LONG, beside, cut="abort" in path)

    async def storm(self, path: str) -> None:
        self.tell(f"POST {path} to both, again and again while chats run")
        answers: list[tuple[int, Any]] = []

        async def beside(task: asyncio.Task[Replies]) -> None:
            while not task.done():
                self.name(f"run 2, step {time.monotonic()}")
                answers.extend([await self.post(side, path) for side in SIDES])
                await asyncio.sleep(0.3)

        await self.ask("both turns", CHATS, beside)
        done, busy = (answers.count((200, {"success": each})) for each in (True, False))
        refused = sum(status == 500 and LOADED in str(told) for status, told in answers)
        self.tell(f"  of {len(answers)} resets {done} succeeded, {busy} found blocks in use, {refused} a prompt loaded")
        self.expect(done + busy + refused == len(answers), f"others were answered: {answers}")

    async def sleeps(self) -> None:
        self.tell("as started")
        await self.ask_anew()
        await self.ask_twice()
        self.tell("both sleep at rest, and are woken")
        self.name("run 4, step 1")
        for side in SIDES:
            await self.sleep(side)
        for side in SIDES:
            await self.wake(side)
        await self.ask_anew()
        await self.ask_twice()
        for number, mode in enumerate(("wait", "abort")):
            await self.while_decode_computes(f"run 5, step {number}", f"/sleep?level=1&mode={mode}", None)
            await self.sleep("prefill")
            await self.wake("prefill")
            await self.ask_anew()

    async def steps(self) -> None:
        self.tell("as started")
        await self.ask_anew()
        await self.ask_twice()
        await self.reset("run 1, step 1", *SIDES)
        await self.ask_anew()
        await self.ask_twice()
        await self.reset("run 1, step 2", "prefill")
        await self.ask_apart()
        await self.reset("run 1, step 2", "decode")
        await self.ask_anew()
        for name, path, success in (("run 1, step 3", RESET, False), ("run 1, step 4", PREEMPTING, True)):
            await self.while_decode_computes(name, path, {"success": success})
            await self.reset(name, "prefill")
            if not success:
                await self.ask_apart()
                await self.reset(name, "decode")
            await self.ask_anew()
        for path in (RESET, PREEMPTING):
            await self.storm(path)
            await self.reset(f"run 2, after {path}", *SIDES)
            await self.ask_anew()
        for number, mode in enumerate(("keep", "wait", "abort")):
            path = f"/pause?mode={mode}"
            await self.while_decode_computes(f"run 3, step {number}", path, {"status": "paused"})
            answers = [(await self.post("prefill", each))[0] for each in (path, "/resume")]
            self.expect(answers == [200, 200], f"prefill answers with {answers}")
            await self.ask_anew()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1:1", metavar="P:D", help="tensor-parallel, of prefill and of decode")
    parser.add_argument("--sleep", action="store_true", help="only engines that sleep and are woken")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    ranks = ranks_of(args.ranks)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    with Cluster(Spec()) as cluster:
        url = cluster.alone().url
        references = {load: asyncio.run(in_time(url, load)) for load in (CHATS, OTHERS, LONG)}
    references[FIRST_TURNS] = [turns[:1] for turns in references[CHATS]]
    with tempfile.TemporaryDirectory(prefix="kvferry-vllm-") as folder:
        files = {name: Path(folder) / f"{name}-weights" for name in SIDES}
        own = {name: {"weights_file": str(path)} for name, path in files.items()}
        spec = Spec(decode_blocks=BLOCKS, prefill_blocks=BLOCKS, extra=PATIENT, extra_of=own, ranks=ranks)
        if args.sleep:
            spec = replace(spec, flags=(*spec.flags, "--enable-sleep-mode"))
        with Cluster(spec) as cluster:
            cluster.kvferry()
            run = Run(cluster, files, references)
            run.tell(
                f"{machine()}; vLLM {version_of(PYTHON)}; ranks {args.ranks}; "
                f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"
            )
            asyncio.run(run.sleeps() if args.sleep else run.steps())
            urls = [engine.url + "/health" for engine in cluster.engines.values()]
            healths = [httpx.get(url, trust_env=False, timeout=30.0).status_code for url in urls]
            run.expect(healths == [200, 200], f"the engines' health is {healths}")
    run.tell(f"{run.tokens} tokens compared, {run.problems} problems")
    if args.output:
        args.output.write_text("\n".join(run.lines) + "\n")
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
