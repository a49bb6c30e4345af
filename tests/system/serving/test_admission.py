"""Admission where pages are too few: overcommit and retraction, priorities, overtaking, warm-up."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, start_replicas
from tests.support.engines import Engines, settled, stats, wait_until
from tests.support.stacks import SmallSystem, running_stack
from tests.system.clients import client_with_pages

PAGE = 16
PAGE_BYTES = 4096  # of the synthetic worker's default geometry at page size 16


def ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(32_000) for _ in range(n)]


@contextmanager
def seven_pages_held(replica: Replica) -> Iterator[None]:
    """By a request of another worker, for as long as the context is open."""
    held, release = threading.Event(), threading.Event()

    async def hold() -> None:
        client = await client_with_pages(replica)
        held.set()
        await asyncio.to_thread(release.wait, 60)
        await client.close()

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(asyncio.run, hold())
        try:
            assert held.wait(20), holding
            yield
        finally:
            release.set()
            holding.result(20)


REQUESTS, NEW_TOKENS = 16, 100  # of each a sixth of the pool


@pytest.mark.nightly
@pytest.mark.parametrize("host_pages", [0, 400])
def test_overcommit_loses_no_token(host_pages: int) -> None:
    """Many requests, each of which may grow to a sixth of the pool, and does: those that were retracted end with the
    same tokens as in a system that never promises too much.
    """
    rng = random.Random(1)
    prompts = [ids(rng, rng.randrange(20, 60)) for _ in range(REQUESTS)]
    flags = ["--host-bytes", str(host_pages * PAGE_BYTES)]
    specs = [
        SmallSystem(page_size=PAGE, decode_pool_bytes=60 * PAGE_BYTES, decode_flags=[*flags, "--overcommit", factor])
        for factor in ("1", "8")
    ]
    outputs = []
    sides = []
    for system in specs:
        with running_stack() as stack:
            prefills, decodes = start_replicas(stack, system)
            with Engines(prefills[0], decodes[0]) as engines:
                turns = engines.turns(prompts, NEW_TOKENS, deadline_s=90.0)
            assert [turn.details for turn in turns if turn.error] == []
            outputs.append([turn.output for turn in turns])
            sides.append(settled(decodes[0]))
            settled(prefills[0])
    assert all(len(output) == NEW_TOKENS for output in outputs[0])
    assert outputs[0] == outputs[1]
    assert sides[0].requests.retracted == 0
    assert sides[1].requests.retracted > 0
    assert sides[1].requests.finished == REQUESTS


def test_small_requests_pass_a_large_one_but_it_gets_its_turn(stack: Stack) -> None:
    prefills, decodes = start_replicas(
        stack,
        SmallSystem(
            page_size=PAGE,
            decode_pool_bytes=40 * PAGE_BYTES,
            decode_flags=["--overtakes", "3"],
            decode_worker_flags=["--synthetic-decode-us", "5000"],
        ),
    )
    rng = random.Random(2)
    ended: list[str] = []

    with Engines(prefills[0], decodes[0]) as engines, ThreadPoolExecutor(32) as pool:

        def run(kind: str, tokens: int, new: int) -> None:
            turn = engines.turn(ids(rng, tokens), new)
            assert turn.error is None, turn.details
            ended.append(kind)

        with seven_pages_held(decodes[0]):
            large = pool.submit(run, "large", 36 * PAGE, 2)
            wait_until(lambda: stats(decodes[0]).requests.waiting == 1, 30)
            small = [pool.submit(run, "small", 2 * PAGE, 40) for _ in range(12)]
            wait_until(lambda: stats(decodes[0]).requests.waiting == 1 + 12 - 3, 30)
        for future in (large, *small):
            future.result(60)
    assert settled(decodes[0]).requests.overtaken == 3
    assert ended.index("large") < len(ended) - 8, "the large one came before most of the later small ones"


def test_a_full_queue_refuses_with_its_bound(stack: Stack) -> None:
    prefills, decodes = start_replicas(
        stack,
        SmallSystem(
            page_size=PAGE,
            decode_pool_bytes=12 * PAGE_BYTES,
            decode_flags=["--queue", "2"],
            prefill_flags=["--grace-seconds", "2"],  # the halves of what was refused wait there for their deadlines
            decode_worker_flags=["--synthetic-decode-us", "10000"],
        ),
    )
    rng = random.Random(3)
    with Engines(prefills[0], decodes[0]) as engines:
        turns = engines.turns([ids(rng, 5 * PAGE) for _ in range(8)], 80, deadline_s=20.0)
    refused = [turn for turn in turns if turn.code == grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert refused
    assert all("wait for admission; the bound is 2" in turn.details for turn in refused)
    assert sum(turn.error is None for turn in turns) >= 3
    assert settled(decodes[0]).requests.refused == len(refused)


def test_smaller_priorities_go_first(stack: Stack) -> None:
    prefills, decodes = start_replicas(
        stack,
        SmallSystem(
            page_size=PAGE, decode_pool_bytes=12 * PAGE_BYTES, decode_worker_flags=["--synthetic-decode-us", "2000"]
        ),
    )
    rng = random.Random(5)
    ended: list[int] = []
    with Engines(prefills[0], decodes[0]) as engines, ThreadPoolExecutor(32) as pool:

        def run(priority: int) -> None:
            turn = engines.turn(ids(rng, 5 * PAGE), 80, priority=priority)
            assert turn.error is None, turn.details
            ended.append(priority)

        with seven_pages_held(decodes[0]):
            waiting = [pool.submit(run, priority) for priority in (5, 5, 5, -5, -5, -5)]
            wait_until(lambda: stats(decodes[0]).requests.waiting == 6, 30)
        for future in waiting:
            future.result(60)
    assert ended == [-5, -5, -5, 5, 5, 5]
