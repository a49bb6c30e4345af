"""Clients that leave, daemons and ranks that die, daemons and engines that stand still, under load: no wrong token, no
hang, nothing leaked.

python bench/vllm/chaos.py [--aborts 100] [--restarts 10] [--stops 8] [--ranks 2:1] [--dp 2] [--rank-kills 2]
    [--listen 20] [--output FILE]

A token that differs from one vLLM's is counted apart where a pair with NixlConnector says it, too, or its decode
engine alone, of which more is heard with --listen: in bfloat16 what is in a cache already decides between neighbours.
A stop is SIGSTOP and, seconds later, SIGCONT. vLLM ends an engine one of whose ranks is killed; it is started anew, and
nothing is asked meanwhile. What fails of the requests that it was at is counted apart, and asked again.
VLLM_LEAVE_SECONDS: clients that leave do so within that time (4; no longer than a reply takes, or few of them leave).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
from chat import Comparison, Messages, Reply, body, new_client, one_server, said, streamed, user_text
from cluster import SCHEDULER, Cluster, Engine, Log, Spec, ranks_of
from compare import done_by

from kvferry.daemon.cli.stack import Process
from kvferry.proto import cache_pb2

REQUEST_SECONDS = 180.0
REST_SECONDS = 120.0
LEAVE_SECONDS = float(os.environ.get("VLLM_LEAVE_SECONDS", "4"))
LISTENERS = 4  # for each client of the storm
LOOK_SECONDS = 0.1
STOP_SECONDS = (0.5, 8.0)  # at least, at most: a session is lost after 3, a request after its deadline


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of each prompt: what one vLLM alone answers, and what a pair with NixlConnector, or its decode engine alone."""

    replies: list[Reply]
    opinions: list[list[Reply]]

    def compare(self, comparison: Comparison, where: str, number: int, reply: Reply) -> None:
        comparison.add(f"{where}, prompt {number}", self.replies[number], reply, self.opinions[number])


@dataclass(frozen=True, slots=True)
class Faults:
    """How many of each happen while clients ask."""

    aborts: int
    restarts: int
    stops: int = 0
    rank_kills: int = 0


@dataclass
class Run:
    faults: Faults
    done: int = 0
    aborted: int = 0
    restarted: int = 0
    stopped: int = 0
    engines_ended: int = 0  # since one of their ranks was killed
    engines_back: int = 0  # of these
    again: int = 0  # requests that failed as an engine ended, and were asked again
    longest: float = 0.0  # seconds of a reply
    refused: list[str] = field(default_factory=list)
    comparison: Comparison = field(default_factory=Comparison)

    @property
    def over(self) -> bool:
        faults = self.faults
        daemons = self.restarted >= faults.restarts and self.stopped >= faults.stops
        return self.aborted >= faults.aborts and daemons and self.engines_back >= faults.rank_kills

    async def until_engines_are_back(self) -> None:
        while self.engines_back < self.engines_ended:
            await asyncio.sleep(LOOK_SECONDS)

    def __str__(self) -> str:
        more = f", {self.stopped} daemons or engines stopped for a while" if self.faults.stops else ""
        if self.faults.rank_kills:
            more += f", {self.engines_back} ranks killed and their engines started, {self.again} requests asked again"
        return (
            f"{self.done} requests finished, {self.aborted} aborted, {self.restarted} daemons killed and started"
            f"{more}; the longest reply took {self.longest:.0f} s"
        )


def prompts(conversations: int, turns: int) -> list[Messages]:
    """Each a beginning of a chat; those of one chat share what they begin with."""
    made = []
    for conversation in range(conversations):
        messages: Messages = []
        for turn in range(turns):
            messages.append({"role": "user", "content": user_text(conversation, turn, 70)})
            made.append(list(messages))
            messages.append({"role": "assistant", "content": user_text(conversation, 100 + turn, 12)})
    return made


async def references(url: str, asked: list[Messages], max_tokens: int) -> list[Reply]:
    async with new_client() as client:
        ask = one_server(client, url)
        limit = asyncio.Semaphore(4)

        async def one(messages: Messages) -> Reply:
            async with limit:
                return await ask(messages, max_tokens)

        return list(await asyncio.gather(*(one(messages) for messages in asked)))


def opinions(
    cluster: Cluster, asked: list[Messages], clients: int, max_tokens: int, seconds: float
) -> list[list[Reply]]:
    """Of each prompt what a pair with NixlConnector, which is up, answers behind a front end. Then each other answer
    that clients who ask it at random hear, and those who ask its decode engine alone, for so many seconds each. What
    the engine finds in its cache, which is small, is another part of the prompt each time, and with more of them at a
    time than in the storm prompts are cut at more places: a kill has what is lacking computed from anywhere on."""
    cluster.start_nixl_front()
    first = asyncio.run(references(cluster.front, asked, max_tokens))
    heard = [{tuple(said(reply, max_tokens)): reply} for reply in first]
    for url in (cluster.front, cluster.engines["decode"].url):
        asyncio.run(listen(heard, url, asked, LISTENERS * clients, max_tokens, seconds))
    return [list(each.values()) for each in heard]


async def listen(
    heard: list[dict[tuple[str, ...], Reply]],
    url: str,
    asked: list[Messages],
    clients: int,
    tokens: int,
    seconds: float,
) -> None:
    until = time.monotonic() + seconds

    async def one(client: httpx.AsyncClient, chosen: random.Random) -> None:
        while time.monotonic() < until:
            number = chosen.randrange(len(asked))
            reply = await streamed(client, url, body(asked[number], tokens), time.monotonic())
            heard[number].setdefault(tuple(said(reply, tokens)), reply)

    async with new_client() as client:
        await asyncio.gather(*(one(client, random.Random(seed)) for seed in range(clients)))


async def client_loop(
    run: Run, client: httpx.AsyncClient, url: str, asked: list[Messages], wanted: Wanted, seed: int, tokens: int
) -> None:
    chosen = random.Random(seed)
    again: int | None = None  # the prompt that is asked again
    while again is not None or not run.over:
        await run.until_engines_are_back()
        number = chosen.randrange(len(asked)) if again is None else again
        leaves = again is None and run.aborted < run.faults.aborts and chosen.random() < 0.6
        again, engines_ended = None, run.engines_ended
        sending = asyncio.create_task(streamed(client, url, body(asked[number], tokens), time.monotonic()))
        finished, _ = await asyncio.wait(
            {sending}, timeout=chosen.uniform(0.0, LEAVE_SECONDS) if leaves else REQUEST_SECONDS
        )
        if not finished:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if leaves:
                run.aborted += 1
            else:
                run.refused.append(f"prompt {number}: no reply within {REQUEST_SECONDS:g} s")
            continue
        try:
            reply = sending.result()
        except (httpx.HTTPError, RuntimeError) as error:
            if run.engines_ended != engines_ended:
                run.again, again = run.again + 1, number
            else:
                run.refused.append(f"prompt {number}: {type(error).__name__} {error}")
            continue
        run.done += 1
        run.longest = max(run.longest, reply.seconds)
        wanted.compare(run.comparison, f"request {run.done}", number, reply)


def by_turns(*names: list[str]) -> list[str]:
    return [name for turn in zip(*names, strict=True) for name in turn]


async def restart_loop(run: Run, cluster: Cluster) -> None:
    """Kills and stops, one at a time: a daemon that stands still is not killed before it has gone on."""
    chosen = random.Random(5)
    faults = [kill] * run.faults.restarts + [stop] * run.faults.stops + [kill_rank] * run.faults.rank_kills
    chosen.shuffle(faults)
    for fault in faults:
        await asyncio.sleep(chosen.uniform(2.0, 8.0))
        await fault(run, cluster, chosen)


async def kill(run: Run, cluster: Cluster, chosen: random.Random) -> None:
    names = by_turns(cluster.daemons_of("decode"), cluster.daemons_of("prefill"))
    name = names[run.restarted % len(names)]
    await asyncio.to_thread(cluster.kill_daemon, name)
    await asyncio.sleep(chosen.uniform(0.0, 3.0))
    await asyncio.to_thread(cluster.start_daemon, name)
    run.restarted += 1


async def stop(run: Run, cluster: Cluster, chosen: random.Random) -> None:
    """A daemon, its couriers going on, or all processes of an engine."""
    places: list[tuple[dict[str, Engine] | dict[str, Process], str, Callable[[int, int], None]]] = [
        (cluster.daemons, cluster.daemons_of("decode")[0], os.kill),
        (cluster.daemons, cluster.daemons_of("prefill")[0], os.kill),
        (cluster.engines, "decode", os.killpg),
        (cluster.engines, "prefill", os.killpg),
    ]
    of, name, send = places[run.stopped % len(places)]
    process = of[name].popen.pid
    send(process, signal.SIGSTOP)
    try:
        await asyncio.sleep(chosen.uniform(*STOP_SECONDS))
    finally:
        send(process, signal.SIGCONT)
    run.stopped += 1


async def kill_rank(run: Run, cluster: Cluster, chosen: random.Random) -> None:
    """Of decode and of prefill, by turns; returns when the engine is back."""
    name = ("decode", "prefill")[run.engines_ended % 2]
    run.engines_ended += 1
    await asyncio.to_thread(cluster.kill_rank, name)
    run.engines_back += 1


async def storm(run: Run, cluster: Cluster, asked: list[Messages], wanted: Wanted, clients: int, tokens: int) -> None:
    async with new_client() as client:
        loops = [client_loop(run, client, cluster.front, asked, wanted, seed, tokens) for seed in range(clients)]
        await asyncio.gather(restart_loop(run, cluster), *loops)


def held(name: str, side: cache_pb2.SideStats) -> list[str]:
    """What a daemon still holds. Its sessions are to be up, with every slot's credit where new parts find it."""
    found = []
    for part, fields in (
        ("pool", ("leased", "arriving", "spilling", "restoring", "orphaned", "promised", "locks")),
        ("requests", ("running", "waiting")),
        ("transfers", ("active",)),
        ("quarantine", ("orphaned_pages", "lost_workers", "draining_transfers")),
    ):
        for field_name in fields:
            if value := getattr(getattr(side, part), field_name):
                found.append(f"{name} daemon: {part}.{field_name} is {value}")
    if not side.peers:
        found.append(f"{name} daemon: there is no session")
    for peer in side.peers:
        where = f"{name} daemon, session with {peer.name}"
        if peer.state != "up":
            found.append(f"{where}: it is {peer.state}")
        if peer.busy_slots or peer.withheld_slots:
            found.append(f"{where}: busy_slots is {peer.busy_slots}, withheld_slots {peer.withheld_slots}")
        if not 0 < peer.free_credits == peer.slots:
            found.append(f"{where}: {peer.free_credits} of {peer.slots} credits are free")
    return found


def ended(cluster: Cluster) -> list[str]:
    """The engines that are no more, with their last words."""
    codes = {engine: engine.popen.poll() for engine in cluster.engines.values()}
    return [
        f"{each.name} engine: it ended with {code}\n{each.tail()}" for each, code in codes.items() if code is not None
    ]


def leaks(cluster: Cluster) -> list[str]:
    """What is still held once everything should be at rest."""
    deadline = time.monotonic() + REST_SECONDS
    while True:
        if found := ended(cluster):
            return found
        for name in ("prefill", "decode"):
            for metric in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                if value := cluster.metric(name, f"vllm:{metric}"):
                    found.append(f"{name} engine: {metric} is {value}")
            for daemon in cluster.daemons_of(name):
                found += held(daemon, cluster.stats(daemon))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aborts", type=int, default=100)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--stops", type=int, default=0, metavar="N", help="of daemons and engines, by turns")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--decode-blocks", type=int, default=64)
    parser.add_argument("--ranks", default="1:1", metavar="P:D", help="tensor-parallel, of prefill and of decode")
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="data-parallel ranks, of prefill and of decode")
    parser.add_argument("--pool", choices=("daemon", "engine"), default="daemon", help="whose it is")
    parser.add_argument("--pool-bytes", default=Spec().pool_bytes, help="of each daemon")
    parser.add_argument("--host-bytes", default=Spec().host_bytes, help="of the host tier of decode's")
    parser.add_argument("--first-token", choices=("decode", "prefill"), default="decode", help="whose is streamed")
    parser.add_argument(
        "--rank-kills", type=int, default=0, metavar="N", help="processes of ranks, of decode and of prefill by turns"
    )
    parser.add_argument(
        "--listen",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="to a pair without kvferry, and to its decode engine",
    )
    parser.add_argument("--output", metavar="FILE")
    args = parser.parse_args()
    log, ranks = Log(Path(args.output) if args.output else None), ranks_of(args.ranks)
    asked = prompts(4, 3)
    with Cluster(Spec()) as cluster:
        alone = asyncio.run(references(cluster.alone().url, asked, args.max_tokens))
    with Cluster(Spec(decode_blocks=args.decode_blocks, ranks=ranks)) as cluster:
        cluster.nixl()
        others = opinions(cluster, asked, args.clients, args.max_tokens, args.listen)
        log.add(f"without kvferry {sum(map(len, others))} answers to {len(asked)} prompts")
        wanted = Wanted(alone, others)
    spec = Spec(decode_blocks=args.decode_blocks, ranks=ranks, dp=args.dp, pool=args.pool)
    spec = replace(spec, pool_bytes=args.pool_bytes, host_bytes=args.host_bytes, extra={"deadline_seconds": 20.0})
    if args.first_token == "prefill":
        spec = replace(spec, first_token="prefill", decode_flags=SCHEDULER)
    with Cluster(spec) as cluster:
        cluster.kvferry()
        faults = Faults(args.aborts, args.restarts, args.stops, args.rank_kills)
        told, failed = run_on(cluster, asked, wanted, faults, args.clients, args.max_tokens)
        log.add(*told)
    return 1 if failed else 0


def alike(told: list[str]) -> list[str]:
    """Differences of several requests' replies to a prompt, in one line."""
    times = Counter(re.sub(r": (request \d+|afterwards), ", ": ", each) for each in told)
    return [f"{each} ({count} times)" for each, count in times.items()]


def run_on(
    cluster: Cluster, asked: list[Messages], wanted: Wanted, faults: Faults, clients: int, tokens: int
) -> tuple[list[str], int]:
    """The storm on servers that are up: what to tell, and how much was wrong."""
    run = Run(faults)
    began = time.monotonic()
    asyncio.run(storm(run, cluster, asked, wanted, clients, tokens))
    seconds = time.monotonic() - began
    if gone := ended(cluster):
        return [f"{run}; in {seconds:.0f} s", *(f"  FAILED: {each}" for each in (*run.refused, *gone))], len(gone)
    leaked = leaks(cluster)
    before = done_by(cluster, "kvferry")
    replies = asyncio.run(references(cluster.front, asked, tokens))
    for number, reply in enumerate(replies):
        wanted.compare(run.comparison, "afterwards", number, reply)
    done = done_by(cluster, "kvferry").less(before)
    idle = done.delta_pages + done.hit_tokens == 0  # no engine has found its way back to its daemon
    leaked += leaks(cluster)
    lines = [
        f"{run}; in {seconds:.0f} s",
        f"{run.comparison}; {len(run.refused)} requests failed; {len(leaked)} leaks; afterwards the decode daemon "
        f"received {done.delta_pages} pages and held {done.hit_tokens} tokens",
        *(["  MISSED: with all daemons back nothing is received or found"] if idle else []),
        *(f"  FAILED: {told}" for told in run.refused),
        *(f"  LEAK: {told}" for told in leaked),
        *alike(run.comparison.told),
    ]
    return lines, len(run.comparison.wrong) + len(run.refused) + len(leaked) + idle


if __name__ == "__main__":
    sys.exit(main())
