"""A request that the daemon takes back and admits again gives the tokens and pages of one that it leaves alone."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import numpy as np
import pytest

from kvferry.proto import engine_pb2, worker_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.workers.handoff import pack_first_token
from kvferry.workers.models.sampling import Sampling
from kvferry.workers.models.transformer import loaded
from tests.support.fake_daemon import Event, FakeDaemon, Message
from tests.support.tiny_models import VOCABULARY, plain_tokens, random_model
from tests.support.worker_stack import WorkerStack
from tests.workers.retracting import Retracting
from tests.workers.retraction_stack import (
    KEEP,
    PAGE,
    admits,
    check_words,
    decode,
    fill,
    finishes,
    order,
    output_of,
    run,
    tokens_of,
)


@pytest.mark.parametrize("keep", list(KEEP))
@pytest.mark.parametrize(("family", "seed", "count"), [("qwen2", 1, 1), ("qwen2", 2, 3), ("gpt2", 3, 3)])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_model_gives_the_tokens_of_one_process(
    tmp_path: Path, family: str, seed: int, count: int, sampled: bool, keep: str
) -> None:
    network = random_model(family)
    model = loaded(network, family, "1")
    shape = model.shape
    geometry = KVGeometry(shape.layers, shape.kv_heads, shape.head_dim, shape.dtype, PAGE, Layout.PAGE_NHD)
    rng = np.random.default_rng(seed)
    prompt = [int(token) for token in rng.integers(0, VOCABULARY, 21)]
    at = {int(position) for position in rng.choice(np.arange(21, 58), count, replace=False)}
    sampling = engine_pb2.Sampling(temperature=1.2, top_p=0.95, top_k=50, seed=seed) if sampled else None

    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        replies = await decode(stack, order(prompt, 40, sampling=sampling))
        wanted = Sampling.from_proto(sampling) if sampling else None
        assert tokens_of(replies) == plain_tokens(network, prompt, 40, 6, wanted)
        assert sum(reply.HasField("paused") for reply in replies) == count
        assert sum(reply.HasField("started") for reply in replies) == 1
        assert (replies[-1].ending.reason, replies[-1].ending.output_tokens) == ("length", 40)
        assert len(admits(daemon)) == count + 1
        check_words(daemon, prompt, tokens_of(replies))

    run(tmp_path, scenario, at=at, keep=keep, geometry=geometry, compute=lambda c: model.compute(c.pools))


@pytest.mark.parametrize("prefill", ["", "p"])
@pytest.mark.parametrize("keep", list(KEEP))
@pytest.mark.parametrize("seed", range(8))
def test_synthetic_pages_and_tokens(tmp_path: Path, seed: int, keep: str, prefill: str) -> None:
    rng = np.random.default_rng(seed)
    prompt = [int(token) for token in rng.integers(0, 1000, rng.integers(1, 12))]
    expected = output_of(prompt, 30)
    last = len(prompt) + 28
    count = int(rng.integers(1, 6))
    at = {int(position) for position in rng.choice(np.arange(len(prompt), last), count, replace=False)}

    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        if prefill:
            fill(daemon, prompt)
        daemon.aux = pack_first_token(expected[0])
        replies = await decode(stack, order(prompt, 30, prefill=prefill, priority=-3))
        assert tokens_of(replies) == expected
        assert not retracting.at
        check_words(daemon, prompt, expected)
        assert [admit.prefill for admit in admits(daemon)] == [prefill] + [""] * count
        assert {admit.priority for admit in admits(daemon)} == {-3}

    run(tmp_path, scenario, at=at, keep=keep)


def test_a_retraction_takes_the_place_of_grown(tmp_path: Path) -> None:
    """Each grow is answered so once: the next stay has that page as one of its prompt or asks again."""
    prompt = [1, 2, 3]

    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        grows: list[int] = []

        def refuse(message: Message) -> list[Event]:
            grows.append(message.grow.tokens)
            if grows.count(message.grow.tokens) > 1:
                return daemon._on_grow(message)
            return [Event(retract=worker_pb2.Retract(name=message.grow.name))]

        daemon.override["grow"] = refuse
        replies = await decode(stack, order(prompt, 30))
        assert tokens_of(replies) == output_of(prompt, 30)
        assert len(admits(daemon)) > 4
        check_words(daemon, prompt, tokens_of(replies))

    run(tmp_path, scenario, at=set())


def test_retracted_while_the_prompt_is_computed_it_gives_one_token(tmp_path: Path) -> None:
    prompt = list(range(30))

    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        replies = await decode(stack, order(prompt, 9))
        assert tokens_of(replies) == output_of(prompt, 9)
        assert [
            (finish.tokens, admit.tokens) for finish, admit in zip(finishes(daemon), admits(daemon), strict=True)
        ] == [
            (30, 30),
            (38, 31),
        ]

    run(tmp_path, scenario, at={3, 20})


def test_a_wrong_byte_of_a_kept_page_is_found(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        def damage(message: Message) -> list[Event]:
            events = daemon._on_finish(message)
            daemon.pool[1, 5] ^= 1
            return events

        daemon.override["finish"] = damage
        with pytest.raises(grpc.aio.AioRpcError, match=r"page 1 \(page 1 of the request\).*first at byte 5"):
            await decode(stack, order([1, 2, 3], 20))
        await daemon.wait_for("abort")

    run(tmp_path, scenario, at={15})


@pytest.mark.parametrize(("stop_at", "reason"), [(7, "stop"), (None, "length")])
def test_retracted_at_its_last_token_it_ends(tmp_path: Path, stop_at: int | None, reason: str) -> None:
    prompt = [1, 2, 3]
    expected = output_of(prompt, 8)

    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        stops, most = ([expected[stop_at]], 50) if stop_at else ([], 8)
        replies = await decode(stack, order(prompt, most, stop_tokens=stops))
        assert tokens_of(replies) == expected
        assert replies[-1].ending.reason == reason
        assert not retracting.at
        assert len(admits(daemon)) == len(finishes(daemon)) == 1

    run(tmp_path, scenario, at={len(prompt) + 6})
