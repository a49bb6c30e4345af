"""Latent attention and an indexer over pages: what a model says from pages that came to other ranks, cache by cache,
and from several requests at a time."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.client.rank_pools import Bytes, RankPools
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.rank_lanes import rank_geometry
from kvferry.workers.models.interface import Prompt, Step
from kvferry.workers.models.sampling import Sampling
from kvferry.workers.models.transformer import LoadedModel, kv_shape, loaded
from tests.support.tiny_models import VOCABULARY, plain_tokens, random_model

PAGE, PAGES = 8, 12
ORDERS = list(StorageOrder)


def pools_of(model: LoadedModel, order: StorageOrder, ranks: int) -> RankPools:
    message = model.geometry
    message.page_size = PAGE
    geometry = KVGeometry.from_proto(message)
    size = PAGES * rank_geometry(geometry, ranks).page_bytes
    return RankPools(geometry, order, PAGES, [np.full(size, 0xEE, np.uint8) for _ in range(ranks)])


def page_of(pools: RankPools, page: int, rank: int) -> Bytes:
    """All its caches, of one rank, which has all."""
    return np.concatenate([pools.read(rank, page, cache).ravel() for cache in range(len(pools.geometry.caches))])


def prompt_of(seed: int, tokens: int) -> tuple[list[int], Prompt]:
    words = [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, tokens)]
    return words, Prompt(np.array(words, dtype=np.uint32), b"", b"")


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), pytest.param(2, 4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_a_model_says_from_pages_that_came_what_it_says_in_one_process(
    family: str, senders: int, receivers: int
) -> None:
    network = random_model(family)
    model = loaded(network, family, "1")
    words, spec = prompt_of(1, 37)
    source, target = pools_of(model, ORDERS[0], senders), pools_of(model, ORDERS[1], receivers)
    prefill = model.compute(source).sequence(spec, [4, 1, 3, 7, 9], Sampling(), shared_tokens=0)
    prefill.resume(0)
    for start in range(0, 37, 16):
        prefill.prompt(start, min(start + 16, 37))
    output = [prefill.first_token()]
    for page, to in ((4, 0), (1, 5), (3, 2), (7, 6), (9, 8)):
        target.store(to, page_of(source, page, senders - 1))
    decode = model.compute(target).sequence(spec, [0, 5, 2, 6, 8], Sampling(), shared_tokens=32)
    decode.resume(37)
    decode.add_pages([3])
    while len(output) < 8:
        output.append(decode.step(output[-1], 36 + len(output)))
    assert output == plain_tokens(network, words, 8, chunk_tokens=16)
    for page in (0, 5, 2, 6, 8):
        assert all(np.array_equal(page_of(target, page, 0), page_of(target, page, rank)) for rank in range(receivers))


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_steps_together(family: str) -> None:
    network = random_model(family)
    model = loaded(network, family, "1")
    compute = model.compute(pools_of(model, ORDERS[2], 2))
    made = [
        (prompt_of(seed, tokens), pages) for seed, tokens, pages in ((2, 30, [0, 1, 2, 3, 4]), (3, 21, [5, 6, 7, 8]))
    ]
    sequences, outputs = [], []
    for (words, spec), pages in made:
        sequence = compute.sequence(spec, pages, Sampling(), shared_tokens=0)
        sequence.resume(0)
        sequence.prompt(0, len(words))
        sequences.append(sequence)
        outputs.append([sequence.first_token()])
    for _ in range(5):
        steps = [
            Step(sequence, output[-1], len(words) + len(output) - 1)
            for sequence, output, ((words, _), _) in zip(sequences, outputs, made, strict=True)
        ]
        for output, token in zip(outputs, compute.steps(steps), strict=True):
            output.append(token)
    for output, ((words, _), _) in zip(outputs, made, strict=True):
        assert output == plain_tokens(network, words, 6, chunk_tokens=len(words))


def test_what_a_model_keeps_of_a_token() -> None:
    plain, indexed = (kv_shape(random_model(family)) for family in ("deepseek_v3", "deepseek_v32"))
    assert (plain.kv_heads, plain.head_dim, plain.tensors, plain.further) == (1, 16, 1, ())
    assert [str(cache) for cache in indexed.further] == ["3 layers of 1 x 1 x 8 float32"]
    assert (plain.token_bytes, indexed.token_bytes) == (3 * 16 * 4, 3 * (16 + 8) * 4)


def test_pools_of_another_model_are_refused() -> None:
    one, other = (loaded(random_model(family), family, "1") for family in ("deepseek_v3", "deepseek_v32"))
    with pytest.raises(ValueError, match=r"geometry is KVShape.*; the model's is KVShape.*CacheShape"):
        other.compute(pools_of(one, ORDERS[0], 1))
