"""A worker whose stream broke, and which is stopped, or lives in another PID namespace: only that its lock is free
proves that it writes no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, start_replicas
from tests.support.engines import describe, settled, stats, wait_until
from tests.support.stacks import SmallSystem

PAGE = 16
pytestmark = pytest.mark.timeout(90)

LOST = """
import asyncio, os, sys, time
from kvferry.proto import common_pb2
from kvferry.radix.digests import prompt_digests
from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName

async def main() -> None:
    facts = common_pb2.NamespaceFacts.FromString(bytes.fromhex(sys.argv[2]))
    client = await DaemonClient.connect(sys.argv[1], common_pb2.ROLE_DECODE, facts, "lost")
    prompt = prompt_digests(list(range(100)), page_size=16)
    name = RequestName(os.urandom(16), 1)
    await client.admit(
        name, digests=prompt.digests, tokens=100, tail_digest=prompt.tail, prefill="", max_new_tokens=5, deadline_s=10
    )
    await client.ready(name)
    client._stream.frames.abort()
    await asyncio.sleep(0.1)
    print(os.getpid(), flush=True)
    time.sleep(600)

asyncio.run(main())
"""


@contextmanager
def lost_worker(decode: Replica, prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """One whose stream has broken, and which lives: its 7 pages are orphaned."""
    facts = describe(decode).facts.SerializeToString().hex()
    command = [*prefix, sys.executable, "-c", LOST, decode.socket, facts]
    lost = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert lost.stdout is not None and lost.stderr is not None
        told = lost.stdout.readline()
        if not told and prefix:
            said = lost.stderr.read().split("\n")
            pytest.skip(f"it does not start in a PID namespace of its own: {' '.join(said[-2:])[:200]}")
        assert told, lost.stderr.read()
        assert not prefix or int(told) < 10, "it does not live in a namespace of its own"
        wait_until(lambda: stats(decode).pool.orphaned == 7)
        yield lost
    finally:
        os.killpg(lost.pid, signal.SIGKILL)
        lost.wait(10)


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param((), id="here", marks=pytest.mark.nightly),
        pytest.param(("unshare", "--pid", "--fork", "--kill-child"), id="namespace"),
    ],
)
def test_a_lost_worker_that_is_stopped_keeps_its_pages(stack: Stack, prefix: tuple[str, ...]) -> None:
    _, decodes = start_replicas(stack, SmallSystem(page_size=PAGE, prefills=0))
    decode = decodes[0]
    with lost_worker(decode, prefix) as lost:
        os.killpg(lost.pid, signal.SIGSTOP)
        time.sleep(1.0)
        assert (stats(decode).pool.orphaned, stats(decode).quarantine.lost_workers) == (7, 1)
        os.killpg(lost.pid, signal.SIGCONT)
        time.sleep(0.5)
        assert stats(decode).pool.orphaned == 7, "it lives, and may write"
    assert settled(decode, 5.0).quarantine.lost_workers == 0


def test_a_daemon_that_ends_waits_for_no_lost_worker(stack: Stack) -> None:
    """Nothing runs: its grace period, longer than this test may take, is for requests that somebody waits for."""
    spec = SmallSystem(page_size=PAGE, prefills=0, decode_flags=("--grace-seconds", "600"))
    _, decodes = start_replicas(stack, spec)
    with lost_worker(decodes[0]):
        assert stack.stop(decodes[0].daemon, seconds=30.0) == 0, decodes[0].daemon.tail()
    with open(decodes[0].daemon.log_path) as log:
        assert "SIGTERM: draining, 0 requests run" in log.read()
