"""Whole systems whose pools and slots are on GPUs: what holds in shared memory holds there."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import tiny_models
from devices import need
from engines import Engines, settled
from test_ranks import PAGE, Case, chat_over_both_tiers, ids, spec_of

from kvferry.daemon.stack import Stack
from kvferry.daemon.system import SystemSpec, start_replicas
from kvferry.workers.model import kv_shape

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


def test_greedy_tokens_are_those_of_one_process(stack: Stack, tmp_path: Path) -> None:
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
