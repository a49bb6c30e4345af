"""A daemon that is killed, stopped or stands still while its host tier grows, and requests run: nobody reads a wrong
byte. Of what its file held nothing is lost that it did not come to, and of the rest no more than had to make room: a
tier that is small as yet may have none for what the requests leave.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, start_replicas
from kvferry.transfer.host_tier.index import DIGEST_BYTES, ENTRY, HEADER_BYTES, Header, Recovered, RowIndex
from tests.support import with_slow_growth
from tests.support.engines import Engines, Turn, grown, settled, stats, wait_until
from tests.support.standstill import is_stopped
from tests.system.serving.test_tiers import INDEX_FILE, PAGE, PAGE_BYTES, ids, restarted, spec

SLOWLY = (sys.executable, with_slow_growth.__file__)
CHUNK_ROWS = with_slow_growth.CHUNK_BYTES // PAGE_BYTES
HOST_PAGES, PROMPTS, PAGES = 480, 30, 10  # of the tier; of each prompt
REFUSED = "the daemon is shutting down; send the request to another one"
ASKED = 12  # of the prompts, while the tier grows


def chunks_there(decode: Replica) -> tuple[int, int]:
    """Pages of the tier that are there, and all of them."""
    host = stats(decode).host
    return host.pages, host.asked_pages


def outputs(turns: list[Turn]) -> list[list[int]]:
    assert [turn.details for turn in turns if turn.error] == []
    return [turn.output for turn in turns]


def in_file(folder: Path) -> Recovered:
    """The entries of the tier's file, whose daemon is gone."""
    data = bytearray((folder / INDEX_FILE).read_bytes())
    header = Header.decode(data[:HEADER_BYTES])
    assert header is not None
    entries = np.frombuffer(data, ENTRY, header.pages, HEADER_BYTES)
    return RowIndex(entries, header, lambda written: None).recover()


def digests_from(held: Recovered, row: int) -> set[bytes]:
    """The pages in rows from this one on."""
    return {digest.tobytes() for digest in held.digests[held.rows >= row]}


def leading(held: Recovered) -> int:
    """How many pages a prompt can find: each page before them is held, too."""
    parents = {digest.tobytes(): parent.tobytes() for digest, parent in zip(held.digests, held.parents, strict=True)}

    def is_found(page: bytes) -> bool:
        while page in parents:
            page = parents[page]
        return page == bytes(DIGEST_BYTES)

    return sum(map(is_found, parents))


def fetched(turns: list[Turn]) -> int:
    """Pages at most that came from prefill, and stay: each may need a row that another page has. A prompt's last page,
    which is not full, goes with its request; a request that was refused has asked for none."""
    failed = [turn for turn in turns if turn.error and not turn.delta_pages and REFUSED not in turn.details]
    return sum(turn.delta_pages - 1 for turn in turns if turn.delta_pages) + PAGES * len(failed)


def hurt(stack: Stack, decode: Replica, prefill: Replica, prompts: list[list[int]], how: str) -> tuple[list[Turn], int]:
    """The prompts' turns, of which the first has ended as the signal comes to the daemon; and a row that was not made
    before the signal's end, as none behind it: until the last turn was over, or the daemon was gone."""
    pid = decode.daemon.popen.pid
    with Engines(prefill, decode) as engines, ThreadPoolExecutor(4) as threads:
        wait_until(lambda: chunks_there(decode)[0] > 0, 20, "the first chunk")
        running = [threads.submit(engines.turn, prompt, 5) for prompt in prompts for _ in range(2)]
        wait_until(lambda: any(turn.done() for turn in running), 20, "the first request")
        began = time.monotonic()
        there, asked = chunks_there(decode)
        assert 0 < there < asked, "it does not grow any more"
        os.kill(pid, getattr(signal, how))
        if how == "SIGSTOP":
            wait_until(lambda: is_stopped(pid), 5, "that it stands still")
            time.sleep(1.5)
            os.kill(pid, signal.SIGCONT)
        turns = [turn.result() for turn in running]
    if how == "SIGSTOP":
        return turns, settled(decode).host.pages
    decode.daemon.popen.wait(20)
    chunks = 1 + int((time.monotonic() - began) / with_slow_growth.CHUNK_SECONDS)  # at most, since then
    stack.stop(decode.worker)
    return turns, there + chunks * CHUNK_ROWS


@pytest.mark.nightly
@pytest.mark.parametrize("tier", ["file", "memory"])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGSTOP"])
def test_while_its_tier_grows(stack: Stack, tmp_path: Path, how: str, tier: str) -> None:
    system = spec(60, HOST_PAGES, *(("--host-dir", str(tmp_path), "--checksums", "on") if tier == "file" else ()))
    prefills, decodes = start_replicas(stack, system)
    prefill, rng = prefills[0], random.Random(8)
    prompts = [ids(rng, PAGES * PAGE + 3) for _ in range(PROMPTS)]
    with Engines(prefill, decodes[0]) as engines:
        first = outputs([engines.turn(prompt, 5) for prompt in prompts])
    assert stack.stop(decodes[0].daemon) == 0
    stack.stop(decodes[0].worker)
    before = in_file(tmp_path) if tier == "file" else None
    held: Recovered | None = None
    assert before is None or leading(before) == PROMPTS * PAGES

    decode = restarted(stack, decodes[0], prefill, system, SLOWLY)
    turns, unread = hurt(stack, decode, prefill, prompts[:ASKED], how)
    done = [turn for turn in turns if turn.error is None]
    known = {tuple(output) for output in first}
    assert all(tuple(turn.output) in known for turn in done), "a wrong byte was read"
    if how == "SIGSTOP":
        assert len(done) == len(turns)
    else:
        held = in_file(tmp_path) if before is not None else None
        decode = restarted(stack, decode, prefill, system)
    side = grown(decode)
    assert side.tiers.mismatched_pages == 0
    assert side.tiers.recovered_pages > 0 or tier == "memory"
    with Engines(prefill, decode) as engines:
        again = [engines.turn(prompt, 5) for prompt in prompts]
    assert outputs(again) == first
    found = sum(turn.matched for turn in again) // PAGE
    if before is not None and held is not None:
        kept = digests_from(held, 0)
        assert digests_from(before, unread) <= kept, "what it did not come to is lost"
        assert how == "SIGKILL" or len(digests_from(before, 0) - kept) <= fetched(turns), "what the file held is lost"
        assert found == leading(held), "what the file holds is not found"
    elif before is not None:  # what is dropped takes with it what hangs below
        gone = side.tiers.host_evicted_pages + PAGES * side.tiers.dropped_pages
        assert PROMPTS * PAGES - found <= gone, "what the file held is lost"
    side = settled(decode)
    assert side.tiers.mismatched_pages == 0 and side.tiers.restore_failed_pages == 0
    assert side.tiers.orphan_pages == 0 or how == "SIGKILL"
