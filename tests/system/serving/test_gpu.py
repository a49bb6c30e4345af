"""Whole systems whose pools and slots are on GPUs: what holds in shared memory holds there."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import SystemSpec, start_replicas
from kvferry.transfer.mapping.ipc_memory import IpcMemory
from kvferry.workers.models.transformer import kv_shape
from tests.support import tiny_models
from tests.support.devices import need
from tests.support.engines import Engines, settled
from tests.system.serving.engine_pools import again, met_again, on_engines
from tests.system.serving.ranks import PAGE, Case, chat_over_both_tiers, ids, spec_of

pytestmark = pytest.mark.gpu

ONE, TWO = ("cuda:0",), ("cuda:0", "cuda:1")
SYSTEMS = {
    "both on one": (ONE, ONE, Case(1, 1, ("page", "layer"), slot_bytes=1 << 20)),
    "both on one, a row in several parts": (ONE, ONE, Case(1, 1, ("layer", "layer-blocks"), slot_bytes=4096)),
    "one each": (("cuda:0",), ("cuda:1",), Case(1, 1, ("layer", "page"), layout="hnd", slot_bytes=1 << 20)),
    "1 to 2": (ONE, TWO, Case(1, 2, ("page", "layer"), slot_bytes=1 << 20)),
    "2 to 1": (TWO, ONE, Case(2, 1, ("layer", "page"), slot_bytes=1 << 20)),
}


def on(system: SystemSpec, prefill: tuple[str, ...], decode: tuple[str, ...]) -> SystemSpec:
    need(*(int(device.removeprefix("cuda:")) for device in (*prefill, *decode)))
    return dataclasses.replace(system, prefill_device=",".join(prefill), decode_device=",".join(decode))


@pytest.mark.parametrize("name", SYSTEMS)
def test_chats_over_both_tiers(stack: Stack, name: str) -> None:
    """Pools smaller than the chats: pages are spilled and restored all the time, and every byte is checked."""
    prefill, decode, case = SYSTEMS[name]
    prefills, decodes = start_replicas(stack, on(spec_of(case), prefill, decode))
    chat_over_both_tiers(prefills[0], decodes[0], case)


def test_the_pool_outlives_its_workers(stack: Stack) -> None:
    system = on(spec_of(Case(1, 1, ("page", "page")), decode_pages=200), ONE, ONE)
    prefills, decodes = start_replicas(stack, system)
    prompt = ids(random.Random(2), 100)
    with Engines(prefills[0], decodes[0]) as engines:
        assert engines.turn(prompt, 5).error is None
    stack.kill(decodes[0].worker)
    words = ["worker", "decode", "--socket", decodes[0].socket, "--listen", "127.0.0.1:0", "--synthetic"]
    worker = stack.start("decode-0-worker", [*words, *system.worker_flags])
    successor = dataclasses.replace(decodes[0], worker=worker, worker_address=stack.ready(worker))
    with Engines(prefills[0], successor) as engines:
        turn = engines.turn(prompt, 5)
    assert turn.error is None, turn.details
    assert turn.matched == len(prompt) // PAGE * PAGE


def test_a_courier_that_is_killed_costs_its_session_only(stack: Stack) -> None:
    import psutil

    system = on(spec_of(Case(1, 1, ("layer", "page")), decode_pages=200), ONE, ONE)
    prefills, decodes = start_replicas(stack, system)
    rng = random.Random(3)
    first = ids(rng, 100)
    with Engines(prefills[0], decodes[0]) as engines:
        assert engines.turn(first, 5).error is None
        for replica in (prefills[0], decodes[0]):
            for child in psutil.Process(replica.daemon.popen.pid).children():
                child.kill()
        for _ in range(20):  # the session is met again
            turn = engines.turn(ids(rng, 100), 5)
            if turn.error is None:
                break
        assert turn.error is None, turn.details
        again = engines.turn(first, 5)
    assert again.error is None, again.details
    assert again.matched == len(first) // PAGE * PAGE


@pytest.mark.parametrize("pool", ["daemon", "engine"])
def test_greedy_tokens_are_those_of_one_process(stack: Stack, tmp_path: Path, pool: str) -> None:
    need(0)
    network = tiny_models.random_model("qwen2")
    network.save_pretrained(tmp_path)
    shape = kv_shape(network)
    page_bytes = PAGE * shape.layers * 2 * shape.kv_heads * shape.head_dim * 4
    system = SystemSpec(
        model=str(tmp_path),
        page_size=PAGE,
        decode_pool_bytes=20 * page_bytes,
        prefill_pool_bytes=20 * page_bytes,
        prefill_flags=["--host-bytes", str(200 * page_bytes)],
        decode_flags=["--host-bytes", str(200 * page_bytes)],
        worker_flags=["--chunk-tokens", "48"],
    )
    if pool == "engine":
        system = on_engines(system, 20, Case(1, 1, ("layer", "layer-blocks")), ONE * 2)
    prefills, decodes = start_replicas(stack, on(system, ONE, ONE))
    rng = random.Random(4)
    histories = [[rng.randrange(tiny_models.VOCABULARY) for _ in range(90)] for _ in range(4)]
    with Engines(prefills[0], decodes[0]) as engines:
        for _ in range(3):
            for i, history in enumerate(histories):
                turn = engines.turn(history, 8)
                assert turn.error is None, turn.details
                assert turn.output == tiny_models.plain_tokens(network, history, 8, chunk_tokens=48)
                histories[i] = history + turn.output + [rng.randrange(tiny_models.VOCABULARY) for _ in range(20)]
    assert settled(decodes[0]).tiers.restored_pages > 0


ENGINES = {
    "both on one, a tensor for K and V": (ONE, ONE, Case(1, 1, ("layer", "layer"), slot_bytes=1 << 20)),
    "both on one, a tensor for a layer": (ONE, ONE, Case(1, 1, ("layer-blocks", "page"), slot_bytes=4096)),
    "1 to 2": (ONE, TWO, Case(1, 2, ("page", "layer"), slot_bytes=1 << 20)),
    "2 to 1": (TWO, ONE, Case(2, 1, ("layer", "layer-blocks"), layout="hnd", slot_bytes=1 << 20)),
}


def engines_on(case: Case, prefill: tuple[str, ...], decode: tuple[str, ...], pages: int = 40) -> SystemSpec:
    system = on(spec_of(case), prefill, decode)
    return on_engines(system, pages, case, (",".join(prefill), ",".join(decode)))


@pytest.mark.parametrize("name", ENGINES)
def test_chats_in_memory_of_the_engines(stack: Stack, name: str) -> None:
    """torch's tensors, parts of its allocations, mapped by the daemons: every byte is checked."""
    prefill, decode, case = ENGINES[name]
    prefills, decodes = start_replicas(stack, engines_on(case, prefill, decode))
    chat_over_both_tiers(prefills[0], decodes[0], case)


def test_the_host_tier_survives_the_engine_and_its_memory(stack: Stack) -> None:
    """A worker is killed while pages are spilled and restored; another comes with another number of pages."""
    case = Case(1, 1, ("layer", "layer"), slot_bytes=1 << 20)
    system = engines_on(case, ONE, ONE, pages=24)
    prefills, decodes = start_replicas(stack, system)
    rng = random.Random(5)
    prompts = [ids(rng, 6 * PAGE + 3) for _ in range(10)]
    with Engines(prefills[0], decodes[0]) as engines:
        for prompt in prompts:
            assert engines.turn(prompt, 4).error is None
        thread = threading.Thread(target=lambda: engines.turns(prompts, 4, deadline_s=10))
        thread.start()
        threading.Event().wait(0.05)
        stack.kill(decodes[0].worker)  # with copies under way
        thread.join()
    decode = again(stack, decodes[0], "decode", system, ["--pool-pages", "48"])
    with Engines(prefills[0], decode) as engines:
        turns = [met_again(engines, prompt, 4) for prompt in prompts]
    assert [turn.details for turn in turns if turn.error] == []
    assert sum(turn.matched for turn in turns) > 0
    side = settled(decode)
    assert side.pool.pages == 48
    assert side.tiers.restored_pages > 0
    assert side.tiers.mismatched_pages == side.tiers.restore_failed_pages == side.tiers.spill_failed_pages == 0


EXPORTING = """
import sys, torch
from kvferry.transfer.mapping.ipc_memory import Exporter
words = torch.arange(int(sys.argv[1]), dtype=torch.int64, device="cuda:0")
torch.cuda.synchronize()
exporter = Exporter(0)
handle, offset = exporter.export(words.data_ptr(), words.nbytes)
print(handle.hex(), offset, exporter.device_uuid.hex(), flush=True)
sys.stdin.read()
"""


def test_a_mapping_keeps_the_memory_of_a_process_that_was_killed() -> None:
    """So copies that run when an engine dies, and those behind them, read and write what they were to."""
    need(0)
    import numpy as np
    import torch

    count = 64 << 20  # 512 MiB
    child = subprocess.Popen(
        [sys.executable, "-c", EXPORTING, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    handle, offset, uuid = child.stdout.readline().split()
    nbytes = count * 8
    mapping = IpcMemory(bytes.fromhex(uuid), bytes.fromhex(handle), int(offset) + nbytes)
    whole = torch.as_tensor(mapping, device=f"cuda:{mapping.device}")[int(offset) : int(offset) + nbytes]
    words = whole.view(torch.int64)
    host = torch.empty(count, dtype=torch.int64, pin_memory=True)
    for _ in range(20):  # some 0.2 s of copies that are under way when it is killed
        host.copy_(words, non_blocking=True)
    child.kill()
    child.wait()
    running = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    expected = np.arange(count)
    assert np.array_equal(host.numpy(), expected)
    assert running, "the copies had ended before the process had"
    others = []  # what is free is given to others: none of it is this memory
    while torch.cuda.mem_get_info()[0] > 4 << 30:
        others.append(torch.full((2 << 30,), 255, dtype=torch.uint8, device="cuda:0"))
    host.zero_()
    host.copy_(words)
    assert np.array_equal(host.numpy(), expected)
    words.neg_()
    host.copy_(words)
    assert np.array_equal(host.numpy(), -expected)
    others.clear()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    del whole, words
    mapping.close()
    deadline = time.monotonic() + 10
    while torch.cuda.mem_get_info()[0] < free + nbytes and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert torch.cuda.mem_get_info()[0] >= free + nbytes, "the memory is free once nobody maps it"
