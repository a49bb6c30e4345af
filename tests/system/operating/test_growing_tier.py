"""A daemon that is killed, stopped or stands still while its host tier grows, and requests run: nobody reads a wrong
byte, and of what its file held nothing is lost that it did not come to."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, start_replicas
from tests.support import with_slow_growth
from tests.support.engines import Engines, Turn, grown, settled, stats, wait_until
from tests.support.standstill import is_stopped
from tests.system.serving.test_tiers import PAGE, ids, restarted, spec

SLOWLY = (sys.executable, with_slow_growth.__file__)
HOST_PAGES, PROMPTS, PAGES = 480, 12, 10  # of the tier; of each prompt


def chunks_there(decode: Replica) -> tuple[int, int]:
    """Pages of the tier that are there, and all of them."""
    host = stats(decode).host
    return host.pages, host.asked_pages


def outputs(turns: list[Turn]) -> list[list[int]]:
    assert [turn.details for turn in turns if turn.error] == []
    return [turn.output for turn in turns]


@pytest.mark.parametrize("tier", ["file", pytest.param("memory", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "how", ["SIGKILL", *(pytest.param(h, marks=pytest.mark.nightly) for h in ("SIGTERM", "SIGSTOP"))]
)
def test_while_its_tier_grows(stack: Stack, tmp_path: Path, how: str, tier: str) -> None:
    system = spec(60, HOST_PAGES, *(("--host-dir", str(tmp_path), "--checksums", "on") if tier == "file" else ()))
    prefills, decodes = start_replicas(stack, system)
    prefill, rng = prefills[0], random.Random(8)
    prompts = [ids(rng, PAGES * PAGE + 3) for _ in range(PROMPTS)]
    with Engines(prefill, decodes[0]) as engines:
        first = outputs([engines.turn(prompt, 5) for prompt in prompts])
    assert stack.stop(decodes[0].daemon) == 0
    stack.stop(decodes[0].worker)

    decode = restarted(stack, decodes[0], prefill, system, SLOWLY)
    pid = decode.daemon.popen.pid
    with Engines(prefill, decode) as engines, ThreadPoolExecutor(4) as threads:
        wait_until(lambda: chunks_there(decode)[0] > 0, 20, "the first chunk")
        running = [threads.submit(engines.turn, prompt, 5) for prompt in prompts for _ in range(2)]
        wait_until(lambda: any(turn.done() for turn in running), 20, "the first request")
        there, asked = chunks_there(decode)
        assert 0 < there < asked, "it does not grow any more"
        os.kill(pid, getattr(signal, how))
        if how == "SIGSTOP":
            wait_until(lambda: is_stopped(pid), 5, "that it stands still")
            time.sleep(1.5)
            os.kill(pid, signal.SIGCONT)
        turns = [turn.result() for turn in running]
    done = [turn for turn in turns if turn.error is None]
    known = {tuple(output) for output in first}
    assert all(tuple(turn.output) in known for turn in done), "a wrong byte was read"
    if how == "SIGSTOP":
        assert len(done) == len(turns)
    else:
        decode.daemon.popen.wait(20)
        stack.stop(decode.worker)
        decode = restarted(stack, decode, prefill, system)
    side = grown(decode)
    assert side.tiers.mismatched_pages == 0
    assert side.tiers.recovered_pages > 0 or tier == "memory"
    with Engines(prefill, decode) as engines:
        again = [engines.turn(prompt, 5) for prompt in prompts]
    assert outputs(again) == first
    if tier == "file" and how != "SIGKILL":
        assert all(turn.matched == PAGES * PAGE for turn in again), "what the file held is lost"
    side = settled(decode)
    assert side.tiers.mismatched_pages == 0 and side.tiers.restore_failed_pages == 0
    assert side.tiers.orphan_pages == 0 or how == "SIGKILL"
