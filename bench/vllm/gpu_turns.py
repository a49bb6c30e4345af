"""The load of gpu_compare.py: chats as token ids, whose next turn has what was answered, and what servers say of it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
from chat import events
from cluster import DEVICES, MODEL_NAME, Cluster

TOP_ID = 100_000 if DEVICES else 49_000  # SmolLM's
TIMERS = {
    "P e2e": ("prefill", "e2e_request_latency_seconds"),
    "P queue": ("prefill", "request_queue_time_seconds"),
    "P prefill": ("prefill", "request_prefill_time_seconds"),
    "D TTFT": ("decode", "time_to_first_token_seconds"),
    "D queue": ("decode", "request_queue_time_seconds"),
    "D prefill": ("decode", "request_prefill_time_seconds"),
    "NIXL read": ("decode", "nixl_xfer_time_seconds"),
    "NIXL post": ("decode", "nixl_post_time_seconds"),
}
"""vLLM's histograms, of which the mean is told: (servers, name)."""
SERVERS = {"prefill": "prefill", "decode": "decode", "alone": "decode"}
"""Of engines: as what their metrics are read."""
STAGES = {
    "gather": ("prefill", "gather"),
    "write": ("prefill", "write"),
    "scatter": ("decode", "scatter"),
    "admission": ("decode", "queue"),
    "pages": ("decode", "pages"),
    "aux": ("decode", "aux"),
}
"""Of kvferry's daemons, of each part or request, in the mean: (role, stage)."""
COUNTERS = {
    "NIXL bytes": ("decode", "nixl_bytes_transferred_sum"),
    "NIXL descriptors": ("decode", "nixl_num_descriptors_sum"),
    "NIXL failed": ("decode", "nixl_num_failed_transfers_total"),
    "kvferry loads": ("decode", "kvferry_loads_total"),
    "kvferry load seconds": ("decode", "kvferry_load_seconds_total"),
    "kvferry failed": ("decode", "kvferry_failed_total"),
    "D hit tokens": ("decode", "prefix_cache_hits_total"),
    "P computed": ("prefill", "request_prefill_kv_computed_tokens_sum"),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of chats: `first` tokens, then `more` with each turn, and `output` answered."""

    first: int
    more: int
    turns: int
    output: int

    @property
    def tokens(self) -> int:
        return self.first + (self.turns - 1) * self.more + self.turns * self.output


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_ms: float
    gaps_ms: list[float]  # of each token but the first, behind the one before
    ids: list[int]

    @property
    def between_ms(self) -> float:
        """Its tokens, in the mean."""
        return sum(self.gaps_ms) / max(1, len(self.gaps_ms))


@dataclass(slots=True)
class Measured:
    """Some turns of some chats. Lists: an entry for each answer, or for each turn's requests/s."""

    first_ms: list[float] = field(default_factory=list)  # TTFT of first turns
    ttft_ms: list[float] = field(default_factory=list)  # of the later ones, turn by turn of each round
    between_ms: list[float] = field(default_factory=list)
    gaps_ms: list[list[float]] = field(default_factory=list)  # of the later turns
    per_second: list[float] = field(default_factory=list)  # of a round's later turns
    told: dict[str, list[float]] = field(default_factory=dict)  # of each round: what the servers said of later turns

    @staticmethod
    def of(kept: dict[str, Any]) -> Measured:
        """A kept row's; older ones have the second tokens' gaps alone."""
        second = [[gap] for gap in kept.get("second_ms", [])]
        return Measured(**{"gaps_ms": second, **{name: each for name, each in kept.items() if name != "second_ms"}})

    def turn_ms(self, turn: int, of: int, chats: int) -> list[float]:
        """TTFT of a turn, the first is 0, of rounds of so many chats that have `of`."""
        later = enumerate(self.ttft_ms)
        return self.first_ms if turn == 0 else [each for n, each in later if n // chats % (of - 1) == turn - 1]


async def ask(client: httpx.AsyncClient, url: str, prompt: list[int], body: bytes) -> Answer:
    """The answer, streamed. RuntimeError."""
    began, times, ids = time.perf_counter(), [], []
    async for event in events(client, url + "/v1/completions", body):
        for choice in event["choices"]:
            if got := choice.get("token_ids"):
                times += [time.perf_counter()] * len(got)
                ids += got
    if not ids:
        raise RuntimeError(f"{url}: no token for a prompt of {len(prompt)}")
    gaps = [round((later - sooner) * 1000, 3) for sooner, later in pairwise(times)]
    return Answer((times[0] - began) * 1000, gaps, ids)


def body_of(prompt: list[int], output: int) -> bytes:
    asked = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    return json.dumps({**asked, "max_tokens": output, "prompt": prompt}).encode()


async def nothing(client: httpx.AsyncClient) -> None:
    """Between two turns."""


async def drive(
    cluster: Cluster,
    url: str,
    at_once: int,
    shape: Shape,
    rounds: int,
    between: Callable[[httpx.AsyncClient], Awaitable[None]] = nothing,
    count: int = 0,
) -> Measured:
    """`at_once` chats side by side, or so many at a time of `count`, turn by turn, with `between` awaited between two;
    other chats in each round."""
    done, ids, count = Measured(), random.Random(secrets.randbits(64)), count or at_once
    places = asyncio.Semaphore(at_once)

    async def in_turn(prompt: list[int], body: bytes) -> Answer:
        async with places:
            return await ask(client, url, prompt, body)

    async with httpx.AsyncClient(timeout=httpx.Timeout(300.0), trust_env=False) as client:
        for _ in range(rounds):
            chats = [fresh(ids, shape.first) for _ in range(count)]
            spent, before = 0.0, {}
            for turn in range(shape.turns):
                if turn == 1:
                    before = await said(client, cluster)
                if turn:
                    await between(client)
                bodies = [body_of(chat, shape.output) for chat in chats]
                began = time.perf_counter()
                answers = await asyncio.gather(*(in_turn(*each) for each in zip(chats, bodies, strict=True)))
                spent += (time.perf_counter() - began) if turn else 0.0
                (done.ttft_ms if turn else done.first_ms).extend(answer.ttft_ms for answer in answers)
                done.gaps_ms += [answer.gaps_ms for answer in answers if turn]
                done.between_ms += [answer.between_ms for answer in answers if len(answer.ids) > 1]
                for chat, answer in zip(chats, answers, strict=True):
                    chat += answer.ids + fresh(ids, shape.more)
            if shape.turns > 1:
                done.per_second.append(count * (shape.turns - 1) / spent)
                await settled()
                for name, value in growth(before, await said(client, cluster)).items():
                    done.told.setdefault(name, []).append(value)
    return done


async def settled() -> None:
    """vLLM logs its statistics, and stores what was generated, a moment after the answer."""
    await asyncio.sleep(0.2)


def fresh(ids: random.Random, count: int, top: int = TOP_ID) -> list[int]:
    return [ids.randrange(1000, top) for _ in range(count)]


async def said(client: httpx.AsyncClient, cluster: Cluster) -> dict[str, float]:
    """Sums and counts so far; those that an engine does not have are left out."""
    texts: dict[str, str] = {}
    for name, engine in cluster.engines.items():
        if (server := SERVERS.get(name.partition("-")[0])) is not None:
            texts[server] = texts.get(server, "") + (await client.get(engine.url + "/metrics")).text
    found: dict[str, float] = {}
    for name, (server, metric) in TIMERS.items():
        for part in ("sum", "count"):
            put(found, f"{name} {part}", texts.get(server, ""), f"vllm:{metric}_{part}")
    for name, (server, metric) in COUNTERS.items():
        put(found, name, texts.get(server, ""), f"vllm:{metric}")
    if cluster.daemons:
        for stats in map(cluster.stats, cluster.daemons_of("decode")):
            add(found, "kvferry bytes", stats.transfers.wire_bytes)
            add(found, "kvferry restored bytes", stats.tiers.restored_pages * stats.host.page_bytes)
            add(found, "kvferry restore seconds", stats.tiers.restore_seconds)
            for used in stats.copies.strategies:
                add(found, f"copied {used.strategy}", used.bytes)
        daemons = {daemon: cluster.stats(daemon) for daemon in cluster.daemons}
        for told in daemons.values():
            add(found, "kvferry fetched", told.way_back.fetched_tokens)
            for choice in told.way_back.choices:
                add(found, f"way back {choice.reason}", choice.count)
        for name, (role, stage) in STAGES.items():
            stages = [
                each
                for daemon, told in daemons.items()
                if daemon.startswith(role)
                for each in told.admit_to_ready.stages
            ]
            if times := [each.seconds for each in stages if each.stage == stage]:
                found[f"{name} sum"] = sum(each.sum for each in times)
                found[f"{name} count"] = sum(sum(each.counts) for each in times)
    return found


def add(found: dict[str, float], name: str, value: float) -> None:
    found[name] = found.get(name, 0.0) + value


def put(found: dict[str, float], name: str, text: str, metric: str) -> None:
    if samples := re.findall(rf"^{re.escape(metric)}(?:\{{.*\}})? (\S+)$", text, re.M):
        found[name] = sum(float(sample) for sample in samples)


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Means of timers in ms, counters as they grew."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    means = {
        name: 1000 * grown[f"{name} sum"] / grown[f"{name} count"]
        for name in (*TIMERS, *STAGES)
        if grown.get(f"{name} count")
    }
    return {**means, **{name: value for name, value in grown.items() if not name.endswith((" sum", " count"))}}


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values) or [float("nan")])
