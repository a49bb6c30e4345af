"""Transformers' cache over pages: tokens, keys and values equal those of one process with the dynamic cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvferry.client.rank_pools import RankPools
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.workers.models.interface import Prompt
from kvferry.workers.models.paged_cache import PagedCache, PageTable, rank_views
from kvferry.workers.models.sampling import Sampling
from kvferry.workers.models.transformer import KVShape, LoadedModel, kv_shape, loaded
from kvferry.workers.smollm import converted_model
from tests.support.tiny_models import VOCABULARY, plain_tokens, random_model

PAGE_SIZE = 8
GREEDY = Sampling()


def geometry_of(model: LoadedModel, layout: Layout) -> KVGeometry:
    shape = model.shape
    return KVGeometry(shape.layers, shape.kv_heads, shape.head_dim, shape.dtype, PAGE_SIZE, layout)


def tokens_over_pages(
    model: LoadedModel,
    layout: Layout,
    prompt: list[int],
    new_tokens: int,
    chunk_tokens: int,
    sampling: Sampling = GREEDY,
) -> list[int]:
    """Prefill over one pool, its pages copied to other places of a second pool, decode there."""
    geometry = geometry_of(model, layout)
    count = -(-(len(prompt) + new_tokens) // PAGE_SIZE)
    rng = np.random.default_rng(3)
    pools = [rng.integers(0, 255, (count + 5, geometry.page_bytes), dtype=np.uint8) for _ in range(2)]
    pages = [[int(page) for page in rng.permutation(count + 5)] for _ in range(2)]
    prompt_pages = -(-len(prompt) // PAGE_SIZE)
    spec = Prompt(np.array(prompt, dtype=np.uint32), b"", b"")

    prefill = model.compute(RankPools.single(pools[0], geometry)).sequence(
        spec, pages[0][:prompt_pages], sampling, shared_tokens=0
    )
    prefill.resume(0)
    for start in range(0, len(prompt), chunk_tokens):
        prefill.prompt(start, min(start + chunk_tokens, len(prompt)))
    output = [prefill.first_token()]

    pools[1][pages[1][:prompt_pages]] = pools[0][pages[0][:prompt_pages]]
    shared = len(prompt) // PAGE_SIZE * PAGE_SIZE
    decode = model.compute(RankPools.single(pools[1], geometry)).sequence(
        spec, pages[1][:prompt_pages], sampling, shared_tokens=shared
    )
    decode.resume(len(prompt))
    decode.add_pages(pages[1][prompt_pages:count])
    while len(output) < new_tokens:
        output.append(decode.step(output[-1], len(prompt) + len(output) - 1))
    decode.finish()
    return output


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen2", layout) for layout in Layout]
    + [
        pytest.param(family, layout, marks=[] if layout is Layout.PAGE_NHD else [pytest.mark.nightly])
        for family in ("gpt2", "mixtral")
        for layout in Layout
    ],
)
def test_tokens_equal_those_of_one_process_with_the_dynamic_cache(family: str, layout: Layout) -> None:
    network = random_model(family)
    model = loaded(network, family, "1")
    prompt = [int(token) for token in np.random.default_rng(1).integers(0, VOCABULARY, 45)]
    expected = plain_tokens(network, prompt, 30, chunk_tokens=20)
    assert tokens_over_pages(model, layout, prompt, 30, chunk_tokens=20) == expected
    assert len(set(expected)) > 3  # not a constant


def test_sampled_tokens_equal_those_of_one_process() -> None:
    network = random_model("qwen2")
    model = loaded(network, "qwen2", "1")
    sampling = Sampling(temperature=1.5, top_p=0.95, top_k=50, seed=11)
    prompt = list(range(37))
    expected = plain_tokens(network, prompt, 30, 20, sampling)
    assert tokens_over_pages(model, Layout.PAGE_NHD, prompt, 30, 20, sampling) == expected
    assert expected != plain_tokens(network, prompt, 30, 20, sampling._replace(seed=12))


def test_gathered_keys_and_values_are_those_of_the_dynamic_cache_to_the_bit() -> None:
    network = random_model("qwen2")
    model = loaded(network, "qwen2", "1")
    geometry = geometry_of(model, Layout.PAGE_NHD)
    pool = np.zeros((8, geometry.page_bytes), dtype=np.uint8)
    table = PageTable(PAGE_SIZE, [5, 2, 7, 0], shared_tokens=0)
    paged = PagedCache(rank_views(RankPools.single(pool, geometry)), table, tokens=0)
    plain = DynamicCache(config=network.config)
    tokens = torch.arange(21).unsqueeze(0)
    with torch.inference_mode():
        for start, end in ((0, 13), (13, 20), (20, 21)):
            ours = network(input_ids=tokens[:, start:end], past_key_values=paged).logits
            theirs = network(input_ids=tokens[:, start:end], past_key_values=plain).logits
            assert torch.equal(ours, theirs)
    stored = torch.stack(rank_views(RankPools.single(pool, geometry))[0].layers, 1)
    for index, layer in enumerate(plain.layers):
        rows = torch.cat([stored[page, index] for page in (5, 2, 7)], dim=1)[:, :21]
        assert torch.equal(rows[0].transpose(0, 1), layer.keys[0])
        assert torch.equal(rows[1].transpose(0, 1), layer.values[0])
    untouched = [page for page in range(8) if page not in (5, 2, 7)]
    assert not pool[untouched].any()


def test_a_resumed_prompt_reads_the_pages_and_never_writes_shared_ones() -> None:
    network = random_model("qwen2")
    model = loaded(network, "qwen2", "1")
    geometry = geometry_of(model, Layout.PAGE_NHD)
    pool = np.zeros((8, geometry.page_bytes), dtype=np.uint8)
    compute = model.compute(RankPools.single(pool, geometry))
    prompt = Prompt(np.arange(20, dtype=np.uint32), b"", b"")
    first = compute.sequence(prompt, [0, 1, 2], Sampling(), shared_tokens=0)
    first.resume(0)
    first.prompt(0, 16)
    first.prompt(16, 20)
    kept = pool[:2].copy()
    second = compute.sequence(prompt, [0, 1, 3], Sampling(), shared_tokens=16)
    second.resume(16)
    second.prompt(16, 20)
    assert second.first_token() == first.first_token()
    assert np.array_equal(pool[3], pool[2])
    assert np.array_equal(pool[:2], kept)
    third = compute.sequence(prompt, [0, 1, 3], Sampling(), shared_tokens=16)
    third.resume(8)
    with pytest.raises(AssertionError, match="shared page"):
        third.prompt(8, 20)


def test_bfloat16_pages() -> None:
    model = loaded(random_model("qwen2").to(torch.bfloat16), "qwen2", "1")
    assert model.shape.dtype == "bfloat16"
    prompt = list(range(30))
    expected = plain_tokens(model.network, prompt, 5, chunk_tokens=30)
    assert tokens_over_pages(model, Layout.PAGE_NHD, prompt, 5, chunk_tokens=30) == expected


@pytest.mark.nightly  # tests/system has it in a whole system
def test_smollm2_equals_one_process() -> None:
    try:
        folder = converted_model()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    from kvferry.workers.models.transformer import load_model

    model = load_model(folder, dtype="float32", threads=2, revision="test")
    assert model.shape == KVShape(30, 3, 64, "float32")
    prompt = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 28, 7018, 411, 506, 17, 7018, 3063, 2, 198, 1, 4093]
    prompt += [198, 19556, 2, 198, 1, 520, 9531, 198]
    expected = plain_tokens(model.network, prompt, 12, chunk_tokens=16)
    assert tokens_over_pages(model, Layout.PAGE_NHD, prompt, 12, chunk_tokens=16) == expected


def test_a_model_with_sliding_windows_is_refused() -> None:
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        sliding_window=8,
    )
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        kv_shape(AutoModelForCausalLM.from_config(config))


def test_another_geometry_is_refused() -> None:
    model = loaded(random_model("gpt2"), "gpt2", "1")
    geometry = KVGeometry(3, 4, 4, "float32", PAGE_SIZE, Layout.PAGE_NHD)
    with pytest.raises(ValueError, match="head_dim=8"):
        model.compute(RankPools.single(np.zeros((1, geometry.page_bytes), dtype=np.uint8), geometry))
