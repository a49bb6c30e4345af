"""The host tier in whole systems: device pools far smaller than the working set, files that survive daemons, broken
bytes. The synthetic workers check every byte of every page.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.daemon.cli.stack import Process, Stack
from kvferry.daemon.cli.system import Replica, SystemSpec, start_replicas
from tests.support.engines import Engines, grown, settled
from tests.support.stacks import SmallSystem

PAGE = 16
PAGE_BYTES = 4096  # of the synthetic worker's default geometry at page size 16
ROWS_FILE = "kvferry-host-decode.rows"
INDEX_FILE = "kvferry-host-decode.index"


def ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(32_000) for _ in range(n)]


def spec(pages: int, host_pages: int, *decode_flags: str, prefill_pages: int = 4096) -> SystemSpec:
    return SystemSpec(
        page_size=PAGE,
        decode_pool_bytes=pages * PAGE_BYTES,
        prefill_pool_bytes=prefill_pages * PAGE_BYTES,
        decode_flags=["--host-bytes", str(host_pages * PAGE_BYTES), *decode_flags],
    )


def test_what_the_device_evicts_comes_back_from_the_host(stack: Stack) -> None:
    """Conversations that together need ten times the device pool lose nothing of what they left."""
    prefills, decodes = start_replicas(stack, spec(30, 1000))
    rng = random.Random(1)
    histories = [ids(rng, 100) for _ in range(20)]
    left = [0] * len(histories)
    with Engines(prefills[0], decodes[0]) as engines:
        for _ in range(3):
            for i, history in enumerate(histories):
                turn = engines.turn(history, 20)
                assert turn.error is None, turn.details
                assert turn.matched == left[i] // PAGE * PAGE
                assert turn.delta_pages == -(-len(history) // PAGE) - turn.matched // PAGE
                left[i] = len(history) + 19
                histories[i] = history + turn.output + ids(rng, 30)
    side = settled(decodes[0])
    assert side.requests.host_hit_tokens > 0.9 * side.requests.hit_tokens
    assert side.tiers.restored_pages == side.requests.host_hit_tokens // PAGE
    assert 0 < side.tiers.spilled_pages < side.pool.evicted, "what came back keeps its row: it is not copied again"
    assert side.tiers.dropped_pages == 0
    assert side.host.pages == 1000
    assert side.host.cached == side.host.pages - side.host.free
    settled(prefills[0])


def test_prefill_has_a_host_tier_too(stack: Stack) -> None:
    system = SmallSystem(
        page_size=PAGE,
        prefill_pool_bytes=30 * PAGE_BYTES,
        prefill_flags=["--host-bytes", str(500 * PAGE_BYTES), "--checksums", "on"],
    )
    prefills, decodes = start_replicas(stack, system)
    rng = random.Random(2)
    prompts = [ids(rng, 10 * PAGE + 3) for _ in range(12)]
    with Engines(prefills[0], decodes[0]) as engines:
        for _ in range(2):
            turns = [engines.turn(prompt, 3) for prompt in prompts]
            assert [turn.details for turn in turns if turn.error] == []
    assert all(turn.prefill_matched == 10 * PAGE for turn in turns)
    side = settled(prefills[0])
    assert side.tiers.restored_pages > 0
    assert side.tiers.mismatched_pages == 0


@pytest.mark.nightly
@pytest.mark.parametrize("host_pages", [12, pytest.param(60, marks=pytest.mark.nightly)])
def test_a_host_tier_that_is_too_small_drops_and_goes_on(stack: Stack, host_pages: int) -> None:
    prefills, decodes = start_replicas(stack, spec(40, host_pages, "--policy", "lfu", prefill_pages=60))
    rng = random.Random(3)
    shared = ids(rng, 3 * PAGE)
    prompts = [shared * (i % 2) + ids(rng, rng.randrange(20, 150)) for i in range(100)]
    with Engines(prefills[0], decodes[0]) as engines:
        for _ in range(2):
            turns = engines.turns(prompts, 12)
            assert [turn.details for turn in turns if turn.error] == []
            assert all(len(turn.output) == 12 for turn in turns)
    side = settled(decodes[0])
    assert side.requests.finished == 200
    assert side.tiers.spilled_pages > 0
    assert side.tiers.host_evicted_pages > 0


def test_write_through_copies_before_eviction(stack: Stack) -> None:
    prefills, decodes = start_replicas(stack, spec(200, 200, "--write-through-hits", "2"))
    rng = random.Random(4)
    hot, cold = ids(rng, 10 * PAGE), ids(rng, 10 * PAGE)
    with Engines(prefills[0], decodes[0]) as engines:
        for prompt in (hot, hot, hot, cold):
            assert engines.turn(prompt, 3).error is None
    side = settled(decodes[0])
    assert side.tiers.backup_pages == 10
    assert side.pool.evicted == 0


# -- broken bytes ------------------------------------------------------------------------------------------------------


def flip(path: Path, row_bytes: int = PAGE_BYTES) -> None:
    """Every row's first byte."""
    data = bytearray(path.read_bytes())
    for start in range(0, len(data), row_bytes):
        data[start] ^= 0xFF
    with open(path, "r+b") as rows:
        rows.write(data)


def test_a_broken_row_is_asked_for_again(stack: Stack, tmp_path: Path) -> None:
    prefills, decodes = start_replicas(stack, spec(30, 300, "--host-dir", str(tmp_path), "--checksums", "on"))
    rng = random.Random(5)
    prompts = [ids(rng, 10 * PAGE + 5) for _ in range(6)]
    with Engines(prefills[0], decodes[0]) as engines:
        for prompt in prompts:
            assert engines.turn(prompt, 4).error is None
        settled(decodes[0])
        flip(tmp_path / ROWS_FILE)
        again = [engines.turn(prompt, 4) for prompt in prompts]
        assert [turn.details for turn in again if turn.error] == []
    side = settled(decodes[0])
    assert side.tiers.mismatched_pages > 0
    assert side.tiers.restore_failed_pages == side.tiers.mismatched_pages
    assert side.transfers.asked_again > 0
    # What was promised from the host and broken was received after all.
    assert sum(turn.delta_pages for turn in again) >= side.tiers.mismatched_pages


# -- restarts ----------------------------------------------------------------------------------------------------------


def decode_worker(stack: Stack, decode: Replica) -> Replica:
    """A new worker for a daemon at the same socket."""
    words = ["worker", "decode", "--socket", decode.socket, "--listen", "127.0.0.1:0", "--synthetic"]
    worker = stack.start(f"{decode.name}-worker", words)
    return Replica(decode.name, decode.daemon, worker, decode.daemon_address, stack.ready(worker), decode.socket)


def restarted(
    stack: Stack, decode: Replica, prefill: Replica, system: SystemSpec, prefix: Sequence[str] = ()
) -> Replica:
    """The daemon and its worker once more, with the same flags."""
    words = ["serve", "--role", "decode", "--name", decode.name, "--listen", "127.0.0.1:0", "--socket", decode.socket]
    words += ["--page-size", str(PAGE), "--pool-bytes", str(system.decode_pool_bytes), *system.decode_flags]
    words += ["--peer", f"{prefill.name}={prefill.daemon_address}"]
    daemon: Process = stack.start(decode.name, words, prefix=prefix)
    address = stack.ready(daemon)
    return decode_worker(stack, Replica(decode.name, daemon, decode.worker, address, "", decode.socket))


@pytest.mark.parametrize("how", [pytest.param("SIGTERM", marks=pytest.mark.nightly), "SIGKILL"])
def test_a_restarted_daemon_finds_its_cache(stack: Stack, tmp_path: Path, how: str) -> None:
    system = spec(60, 300, "--host-dir", str(tmp_path))
    prefills, decodes = start_replicas(stack, system)
    rng = random.Random(6)
    shared = ids(rng, 4 * PAGE)
    prompts = [shared + ids(rng, 10 * PAGE) for _ in range(12)]
    with Engines(prefills[0], decodes[0]) as engines:
        first = [engines.turn(prompt, 5) for prompt in prompts]
        before = settled(decodes[0])
    if how == "SIGTERM":
        assert stack.stop(decodes[0].daemon) == 0
    else:
        stack.kill(decodes[0].daemon)
    stack.stop(decodes[0].worker)
    assert oct(os.stat(tmp_path / ROWS_FILE).st_mode & 0o777) == "0o600"
    decode = restarted(stack, decodes[0], prefills[0], system)
    recovered = grown(decode).tiers
    assert recovered.unverified_pages == recovered.recovered_pages
    if how == "SIGTERM":
        assert recovered.recovered_pages == 4 + 12 * 10  # everything
        assert recovered.discarded_entries == 0
    else:
        # What was only on the device is gone, and with it the parent of all: what hangs on it waits to be adopted.
        assert recovered.recovered_pages == before.host.cached
    with Engines(prefills[0], decode) as engines:
        again = [engines.turn(prompt, 5) for prompt in prompts]
    assert [turn.output for turn in again] == [turn.output for turn in first]
    side = settled(decode)
    if how == "SIGTERM":
        assert all(turn.matched == 14 * PAGE for turn in again)
    assert side.requests.host_hit_tokens > 0
    assert side.tiers.orphan_pages == 0
    assert side.tiers.mismatched_pages == 0
    assert side.tiers.unverified_pages < side.tiers.recovered_pages


def damage_files(damage: str, folder: Path, row_bytes: int = PAGE_BYTES) -> None:
    """Does it to the files of a tier whose daemon has ended."""
    rows, index = folder / ROWS_FILE, folder / INDEX_FILE
    if damage == "truncated index":
        os.truncate(index, index.stat().st_size // 3)
    elif damage == "truncated rows":
        os.truncate(rows, rows.stat().st_size // 3)
    elif damage == "garbage":
        index.write_bytes(random.Random(7).randbytes(index.stat().st_size))
    else:
        assert damage == "flipped rows"
        flip(rows, row_bytes)


DAMAGES = ("flipped rows", "garbage", "truncated index", "truncated rows")


@pytest.mark.nightly
@pytest.mark.parametrize("damage", [*DAMAGES, "fewer pages"])
def test_a_damaged_file_is_a_miss(stack: Stack, tmp_path: Path, damage: str) -> None:
    system = spec(60, 300, "--host-dir", str(tmp_path))
    prefills, decodes = start_replicas(stack, system)
    rng = random.Random(7)
    prompts = [ids(rng, 10 * PAGE) for _ in range(8)]
    with Engines(prefills[0], decodes[0]) as engines:
        for prompt in prompts:
            assert engines.turn(prompt, 5).error is None
    stack.stop(decodes[0].daemon)
    stack.stop(decodes[0].worker)
    if damage == "fewer pages":
        system = spec(60, 50, "--host-dir", str(tmp_path))
    else:
        damage_files(damage, tmp_path)
    decode = restarted(stack, decodes[0], prefills[0], system)
    grown(decode)
    with Engines(prefills[0], decode) as engines:
        again = [engines.turn(prompt, 5) for prompt in prompts]
    assert [turn.details for turn in again if turn.error] == []
    tiers = settled(decode).tiers
    if damage == "flipped rows":
        assert tiers.mismatched_pages > 0
    else:
        assert tiers.discarded_entries > 0
        assert tiers.recovered_pages < 80
