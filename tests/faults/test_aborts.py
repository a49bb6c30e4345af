"""Requests that are abandoned at random instants, between real processes with real NIXL, over both tiers: no foreign
byte in any page, and nothing stays held.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest

from kvferry.daemon.cli.system import Replica, start_replicas
from tests.faults.storm import NEW_TOKENS, PAGE, expected, judge
from tests.support.engines import Engines, settled
from tests.support.stacks import SmallSystem, running_stack

THREADS = 6
CONVERSATIONS = 12
DEADLINE_S = 3.0  # for which a prompt waits that was computed, and whose other half left before it had asked


@dataclass
class Counts:
    aborted: int = 0
    answered: int = 0
    refused: int = 0


class Leavers:
    """Clients: five of six turns are abandoned, within about the time that one takes; the rest is judged whole."""

    def __init__(self, engines: Engines, aborts: int, seed: int) -> None:
        self.counts = Counts()
        self._engines, self._aborts, self._seed = engines, aborts, seed
        self._lock = threading.Lock()
        self._takes = 0.1  # seconds of a turn, as far as is known

    def run(self) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(self._client, number) for number in range(THREADS)]:
                done.result()

    def _client(self, number: int) -> None:
        chance = random.Random(self._seed * 100 + number)
        histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
        while self.counts.aborted < self._aborts:
            index = chance.randrange(CONVERSATIONS)
            start = [3] * (3 * PAGE) if index % 2 else [index]
            prompt = (histories[index] or start) + [chance.randrange(30_000) for _ in range(chance.randint(1, 90))]
            leaves = chance.random() < 5 / 6
            began = time.monotonic()
            turn = self._engines.turn(
                prompt,
                NEW_TOKENS,
                deadline_s=DEADLINE_S,
                abandon_after=chance.uniform(0, 1.3 * self._takes) if leaves else None,
            )
            want = expected(prompt, NEW_TOKENS)
            assert turn.output == want[: len(turn.output)], f"{turn.output}, not {want}"
            with self._lock:
                if turn.abandoned:
                    self.counts.aborted += 1
                    continue
                outcome, why = judge(prompt, turn)
                assert outcome != "wrong", why
                self.counts.answered += outcome == "ok"
                self.counts.refused += outcome != "ok"
                if not leaves:
                    self._takes = 0.8 * self._takes + 0.2 * min(1.0, time.monotonic() - began)
            histories[index] = prompt + want if len(prompt) < 350 else []


def descriptors(replicas: list[Replica]) -> list[int]:
    processes = [replica.daemon for replica in replicas] + [replica.worker for replica in replicas]
    return [psutil.Process(process.popen.pid).num_fds() for process in processes]


def abandon(aborts: int, seed: int) -> Counts:
    small = ["--pool-bytes", "512KiB", "--host-bytes", "256KiB", "--checksums", "on", "--slots", "4"]
    slow = ["--synthetic-prefill-us", "50", "--synthetic-decode-us", "1000"]
    spec = SmallSystem(page_size=PAGE, decode_flags=small, prefill_flags=small, worker_flags=slow)
    with running_stack() as stack:
        prefills, decodes = start_replicas(stack, spec)
        replicas = [*prefills, *decodes]
        with Engines(prefills[0], decodes[0]) as engines:
            warm = Leavers(engines, 6, seed + 1)
            warm.run()
            for replica in replicas:
                settled(replica, 20)
            before = descriptors(replicas)
            leavers = Leavers(engines, aborts, seed)
            leavers.run()
            began = time.monotonic()
            sides = [settled(replica, 20) for replica in replicas]  # no page, lock, promise, slot or transfer
            took = time.monotonic() - began
            after = descriptors(replicas)
            counts = leavers.counts
            print(
                f"\n{counts.aborted} aborted, {counts.answered} answered, {counts.refused} refused; nothing held "
                f"{took:.2f} s after the last; descriptors {before} -> {after}; parts dropped: "
                f"{sides[-1].transfers.dropped_parts}, aborted transfers: {sides[-1].transfers.aborted}"
            )
            assert all(now <= then + 6 for then, now in zip(before, after, strict=True)), (before, after)
            assert sides[-1].transfers.aborted > 0, "no transfer was under way when its client left"
    return counts


@pytest.mark.timeout(120)
def test_some_aborts() -> None:
    assert abandon(40, 1).aborted >= 40


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_thousand_aborts(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        counts = abandon(1000, 2)
    assert counts.aborted >= 1000
    assert counts.answered > 0
