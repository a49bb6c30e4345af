"""Kinds of KV caches: latents, quantized ones with their scales, and such that draft models' KV lies beside."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.connectors.blocks import BlockMap, PoolPages
from kvferry.connectors.movers import HostMover
from kvferry.connectors.prompt_chain import AHEAD_NAMES
from kvferry.connectors.scheduler_side import Shape
from kvferry.connectors.settings import Settings
from kvferry.connectors.vllm.caches import Unfit, draft_of, kinds_of, looks_ahead
from kvferry.connectors.vllm.facts import block_map, check_config, check_engine, facts_of, orders_of, with_head_runs
from kvferry.connectors.vllm.weights import draft_name, kv_scales, scales_in
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.transfer.geometry.namespace import NamespaceFacts, differences
from kvferry.transfer.geometry.rank_lanes import lanes_of, rank_geometry

BLOCK, LATENT, LAYERS = 16, 576, 61  # DeepSeek V3's


@dataclass
class MLAAttentionSpec:
    block_size: int = BLOCK
    num_kv_heads: int = 1
    head_size: int = LATENT
    head_size_v: int = LATENT
    dtype: torch.dtype = torch.bfloat16
    compress_ratio: int = 1
    alignment: int | None = None
    model_version: str | None = None
    cache_dtype_str: str | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]


@dataclass
class FullAttentionSpec:
    block_size: int = BLOCK
    num_kv_heads: int = 2
    head_size: int = 64
    head_size_v: int = 64
    dtype: torch.dtype = torch.uint8
    non_causal: bool = False


NAMES = [f"l{i}" for i in range(LAYERS)]


def kv(*specs: object) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=NAMES) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def model(folder: object = "/none", **config: object) -> SimpleNamespace:
    told = {"model_type": "deepseek_v3", **config}
    return SimpleNamespace(
        model=str(folder), revision=None, dtype=torch.bfloat16, quantization=None,
        hf_config=SimpleNamespace(to_dict=lambda: told),
        get_total_num_kv_heads=lambda: 128, max_model_len=4096,
    )  # fmt: skip


def engine(folder: object = "/none", ranks: int = 1, draft: object = None, **cache: object) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        cache_config=SimpleNamespace(
            cache_dtype="auto", get_resolved_kv_cache_layout=lambda: SimpleNamespace(name="LBHNC"), **cache
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        device_config=SimpleNamespace(device_type="cuda"),
        model_config=model(folder),
        speculative_config=draft,
    )  # fmt: skip


def with_dtype(cache_dtype: str, **cache: object) -> SimpleNamespace:
    config = engine(**cache)
    config.cache_config.cache_dtype = cache_dtype
    return config


@pytest.mark.parametrize(
    ("spec", "config", "message"),
    [
        (MLAAttentionSpec(compress_ratio=4), engine(), "compress_ratio of the KV cache is 4"),
        (MLAAttentionSpec(alignment=512), engine(), "alignment of the KV cache is 512: .* packs"),
        (MLAAttentionSpec(model_version="deepseek_v4"), engine(), "model_version of the KV cache is deepseek_v4"),
        (MLAAttentionSpec(tokens_per_state=8), engine(), "tokens_per_state of the KV cache is 8 in layer l0"),
        (MLAAttentionSpec(state_content_bytes=656), engine(), "state_content_bytes of the KV cache is 656"),
        (MLAAttentionSpec(cache_dtype_str="fp8_ds_mla", state_content_bytes=584), with_dtype("fp8_ds_mla"), "is 584"),
        (MLAAttentionSpec(), with_dtype("fp8_ds_mla"), "kv_cache_dtype is 'fp8_ds_mla', which packs"),
        (FullAttentionSpec(non_causal=True), engine(), "layer l0 is non_causal: .*prefix LM"),
        (FullAttentionSpec(), with_dtype("nvfp4"), "kv_cache_dtype is 'nvfp4'"),
        (FullAttentionSpec(), with_dtype("int8_per_token_head"), "kv_cache_dtype is 'int8_per_token_head'"),
        (FullAttentionSpec(), with_dtype("fp8", calculate_kv_scales=True), "without --calculate-kv-scales"),
        (FullAttentionSpec(), with_dtype("fp8", kv_cache_dtype_skip_layers=["3"]), "skip_layers is .'3'."),
    ],
)  # fmt: skip
def test_caches_that_are_refused(spec: object, config: Any, message: str) -> None:
    with pytest.raises(Unfit, match=message):
        kinds_of(config, kv(spec))


def test_a_token_of_deepseek_v3_has_its_latents_bytes_on_the_wire_and_in_the_host_tier() -> None:
    config = engine(ranks=8)
    found = facts_of(config, kv(MLAAttentionSpec()), Shape(BLOCK, 4), Settings("/s", revision="1"))
    assert found.geometry.token_bytes == 70_272 and found.geometry.page_bytes == 64 * 70_272
    assert (found.geometry.kv_heads, found.geometry.tensors, found.engine_layout) == (1, 1, "vllm cuda MLA")
    own = rank_geometry(found.geometry, 8)
    assert own.page_bytes == found.geometry.page_bytes  # every rank has all of it
    for senders, receivers in ((1, 1), (1, 8), (8, 1), (3, 2)):
        lanes = lanes_of(found.geometry, senders, receivers)
        assert [lane.receiver for lane in lanes] == list(range(receivers))
        assert {lane.row_bytes for lane in lanes} == {found.geometry.page_bytes}


def test_where_the_blocks_of_latents_lie() -> None:
    caches = {name: torch.zeros(5, BLOCK, LATENT, dtype=torch.bfloat16) for name in NAMES}
    config, group = engine(), kv(MLAAttentionSpec())
    geometry = KVGeometry(LAYERS, 1, LATENT, "bfloat16", 2 * BLOCK, Layout.ENGINE, tensors=1)
    (order,) = orders_of(config, group, caches)
    assert order.tolist() == np.arange(BLOCK).repeat(LATENT * 2).tolist()
    found = block_map(caches, group, Shape(BLOCK, 2), geometry, [order])
    assert found.bases.tolist() == [caches[name].data_ptr() for name in NAMES]
    assert (found.block_bytes, found.page_bytes) == (BLOCK * LATENT * 2, 2 * BLOCK * 70_272) and found.in_token_order
    short = {**caches, "l3": torch.zeros(5, BLOCK, 512, dtype=torch.bfloat16)}
    with pytest.raises(Unfit, match=r"layer l3: its cache .* 1 heads, 16 tokens, 576 elements"):
        block_map(short, group, Shape(BLOCK, 2), geometry, [order])


K_SCALE = "model.layers.0.self_attn.k_proj.k_scale"


def weights(folder: Path, scale: float, name: str = K_SCALE) -> Path:
    """A checkpoint of one matrix, with a scale of the KV cache behind it."""
    folder.mkdir()
    tensors = {"w": np.ones(4, np.float32), name: np.array([scale], np.float32)}
    header, data = {}, b""
    for name, value in tensors.items():
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": [len(data), len(data) + value.nbytes]}
        data += value.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def test_engines_of_other_scales_share_no_page(tmp_path: Path) -> None:
    folders = [weights(tmp_path / name, scale) for name, scale in (("a", 0.5), ("b", 0.5), ("c", 0.25))]
    assert scales_in(folders[0] / "model.safetensors") == {K_SCALE: b"F32" + np.float32(0.5).tobytes()}
    facts = []
    for folder in folders:
        config = with_dtype("fp8_e4m3")
        config.model_config.model = str(folder)
        facts.append(facts_of(config, kv(FullAttentionSpec()), Shape(BLOCK, 1), Settings("/s", revision="1")))
    assert facts[0].kv_scales and facts[0].id == facts[1].id and "fp8_e4m3" in facts[0].engine_layout
    (difference,) = differences(facts[0], facts[2])
    assert difference.field == "kv_scales" and "serve a checkpoint with the same scales" in str(difference)
    assert kv_scales(engine(folders[0])) == ""  # nothing is quantized


@pytest.mark.parametrize("kind", ["k", "v", "kv"])
def test_the_scales_of_mistrals_own_format_are_found(tmp_path: Path, kind: str) -> None:
    name = f"layers.0.attention.{kind}_fake_quantizer.qscale_act"
    assert list(scales_in(weights(tmp_path / kind, 0.5, name) / "model.safetensors")) == [name]
    assert not scales_in(weights(tmp_path / "q", 0.5, name.replace(f".{kind}_", ".q_")) / "model.safetensors")


@pytest.mark.parametrize("text", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"{]{}", struct.pack("<Q", 9) + b"{}"])
def test_a_file_whose_scales_cannot_be_read_is_told(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(text)
    config = with_dtype("fp8")
    config.model_config.model = str(tmp_path)
    with pytest.raises(Unfit, match=r"the scales of the KV cache cannot be read in .*model\.safetensors"):
        kv_scales(config)


def drafts(method: str, folder: object = "/none", **config: object) -> SimpleNamespace:
    return SimpleNamespace(method=method, draft_model_config=model(folder, **config))


def test_engines_with_other_draft_models_share_no_page(tmp_path: Path) -> None:
    folders = [weights(tmp_path / name, scale) for name, scale in (("a", 0.5), ("b", 0.25))]
    configs = [engine(draft=draft) for draft in (drafts("eagle3", folders[0]), drafts("eagle3", folders[1]), None)]
    names = [draft_name(config, Settings("/s")) for config in configs]
    assert names[0].startswith(f"eagle3 {AHEAD_NAMES} vllm-deepseek_v3-") and names[0] != names[1] and names[2] == ""
    facts = [
        facts_of(config, kv(MLAAttentionSpec()), Shape(BLOCK, 1), Settings("/s", revision="1"))
        for config in configs[1:]
    ]
    (difference,) = differences(*facts)
    assert difference.field == "speculative" and "the same --speculative-config" in str(difference)
    assert [looks_ahead(config) for config in configs] == [True, True, False]


def test_engines_that_name_what_looks_ahead_by_other_rules_share_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(method: str) -> NamespaceFacts:
        config = engine(draft=drafts(method))
        return facts_of(config, kv(MLAAttentionSpec()), Shape(BLOCK, 1), Settings("/s", revision="1"))

    ahead, plain = facts("mtp"), facts("draft_model")
    monkeypatch.setattr("kvferry.connectors.vllm.weights.AHEAD_NAMES", "another rule")
    (difference,) = differences(ahead, facts("mtp"))
    assert difference.field == "speculative" and "install the same kvferry" in str(difference)
    assert facts("draft_model") == plain


def test_which_draft_models_have_kv() -> None:
    assert draft_of(engine(draft=drafts("ngram"))) is None
    assert not looks_ahead(engine(draft=drafts("draft_model"))) and looks_ahead(engine(draft=drafts("mtp")))
    with pytest.raises(Unfit, match=r"speculative_config\.method is 'dflash'; the connector serves eagle, eagle3, mtp"):
        draft_of(engine(draft=drafts("dflash")))


def test_one_group_of_one_kind() -> None:
    for specs in ((MLAAttentionSpec(), FullAttentionSpec()), (replace(MLAAttentionSpec()), MLAAttentionSpec())):
        with pytest.raises(Unfit, match=r"the model has 2 KV cache groups .* in blocks of one table"):
            kinds_of(engine(), kv(*specs))


def test_one_layer_that_attends_to_later_tokens_is_enough() -> None:
    with pytest.raises(Unfit, match=r"layer late\.0 is non_causal"):
        kinds_of(engine(), together(("l", 2, FullAttentionSpec()), ("late", 1, FullAttentionSpec(non_causal=True))))


# -- several caches under one block table

TALL = 64  # tokens of a block


def together(*kinds: tuple[str, int, object]) -> SimpleNamespace:
    """One group of layers of several kinds: a name, how many, and their spec."""
    specs = {f"{name}.{i}": spec for name, count, spec in kinds for i in range(count)}
    group = SimpleNamespace(kv_cache_spec=UniformTypeKVCacheSpecs(specs), layer_names=list(specs))
    return SimpleNamespace(kv_cache_groups=[group])


def indexed(latents: MLAAttentionSpec, layers: int = LAYERS) -> SimpleNamespace:
    """DeepSeek V3.2's: an indexer's keys, quantized, with their scales, beside each layer's latents."""
    keys = MLAAttentionSpec(block_size=TALL, head_size=132, dtype=torch.uint8)
    return together(("indexer", layers, keys), ("attention", layers, latents))


LATENTS = MLAAttentionSpec(block_size=TALL, cache_dtype_str="auto")
PACKED = replace(LATENTS, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656)


def test_a_token_of_deepseek_v32_has_its_indexers_bytes_too() -> None:
    shape, settings = Shape(TALL, 1), Settings("/s", revision="1")
    found = facts_of(engine(ranks=8), indexed(LATENTS), shape, settings)
    assert found.geometry.token_bytes == 70_272 + 8_052
    assert [str(cache) for cache in found.geometry.further] == [
        "61 layers of 1 x 1 x 128 uint8",
        "61 layers of 1 x 1 x 4 uint8",
    ]
    packed = facts_of(with_dtype("fp8_ds_mla"), indexed(PACKED), shape, settings)
    assert kinds_of(with_dtype("fp8_ds_mla"), indexed(PACKED))[0].widths == (656,)
    assert packed.geometry.token_bytes == LAYERS * 656 + 8_052
    print(f"bytes a token: {found.geometry.token_bytes:,}, packed {packed.geometry.token_bytes:,}")
    plain = facts_of(engine(), kv(LATENTS), shape, settings)
    assert {each.field for each in differences(found, plain)} == {"geometry.further"}
    for senders, receivers in ((1, 8), (8, 1), (3, 2)):
        lanes = lanes_of(found.geometry, senders, receivers)
        assert [(lane.receiver, lane.cache) for lane in lanes] == [(r, c) for r in range(receivers) for c in range(3)]
        assert sum(lane.row_bytes for lane in lanes) == receivers * found.geometry.page_bytes


def test_the_schedulers_half_is_told_one_layers_cache() -> None:
    """vLLM gives it any one layer's spec in the place of all (generate_scheduler_kv_cache_config)."""
    config, whole = with_dtype("fp8_ds_mla", enable_prefix_caching=True), indexed(PACKED)
    config.model_config.is_multimodal_model = False
    (group,) = whole.kv_cache_groups
    for spec in (group.kv_cache_spec.kv_cache_specs[name] for name in ("indexer.0", "attention.0")):
        told = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=group.layer_names)])
        assert check_engine(config, told) == check_config(config, whole) == TALL
        shape, settings = Shape(TALL, 1), Settings("/s", revision="1")
        ids = {facts_of(config, each, shape, settings).id for each in (told, whole)}
        assert len(ids) == 2, "so the worker's half says the namespace"


def test_an_indexers_keys_and_scales_lie_apart_in_a_block() -> None:
    """All tokens' keys, then all their scales."""
    layers, config, group = 2, engine(), indexed(LATENTS, 2)
    keys = {f"indexer.{i}": torch.zeros(5, TALL, 132, dtype=torch.uint8) for i in range(layers)}
    caches = {f"attention.{i}": torch.zeros(5, TALL, LATENT, dtype=torch.bfloat16) for i in range(layers)} | keys
    facts = facts_of(config, group, Shape(TALL, 2), Settings("/s", revision="1"))
    found = block_map(caches, group, Shape(TALL, 2), facts.geometry, orders_of(config, group, caches))
    begins = [keys[f"indexer.{i}"].data_ptr() for i in range(layers)]
    latents, values, scales = found.caches
    assert latents.bases.tolist() == [caches[f"attention.{i}"].data_ptr() for i in range(layers)]
    assert values.bases.tolist() == begins and scales.bases.tolist() == [at + TALL * 128 for at in begins]
    assert [cache.block_bytes for cache in found.caches] == [TALL * LATENT * 2, TALL * 128, TALL * 4]
    assert [cache.strides.tolist()[0] for cache in (values, scales)] == [TALL * 132] * 2
    assert found.in_token_order and found.page_bytes == facts.geometry.page_bytes
    assert with_head_runs(facts, config, found, facts.geometry).geometry.head_runs == 1
    short = {**caches, "indexer.1": torch.zeros(5, TALL, 128, dtype=torch.uint8)}
    with pytest.raises(Unfit, match=r"layer indexer\.1: its cache .* 1 heads, 64 tokens, 132 elements"):
        block_map(short, group, Shape(TALL, 2), facts.geometry, orders_of(config, group, caches))
    away = {**caches, **{name: cache.to("meta") for name, cache in keys.items()}}
    with pytest.raises(Unfit, match="the KV caches are on cpu and meta; they must all be on one device"):
        block_map(away, group, Shape(TALL, 2), facts.geometry, orders_of(config, group, caches))


def filled(layers: int, blocks: int, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    widths = (("attention", (TALL, LATENT * 2)), ("indexer", (TALL, 132)))
    return {
        f"{name}.{i}": torch.randint(0, 256, (blocks, *width), dtype=torch.uint8, generator=random)
        for name, width in widths
        for i in range(layers)
    }


def pass_on(there: BlockMap, back: BlockMap, end: int) -> None:
    """A prompt of `end` tokens in blocks 4, 1, 3 and 0, by a pool into blocks 1, 0, 2 and 3."""
    memory = np.full(3 * there.page_bytes, 0xEE, np.uint8)
    pool = PoolPages.of(memory, 3)
    moved = there.places(pool, [2, 0], [4, 1, 3, 0], 0, end)
    HostMover(there).to_pages(pool, moved, None, there.tail([2, 0], end))
    assert (memory[there.page_bytes : 2 * there.page_bytes] == 0xEE).all(), "nobody's page"
    HostMover(back).to_blocks(pool, back.places(pool, [2, 0], [1, 0, 2, 3], 0, end), None)


def test_pages_of_several_caches_go_to_the_pool_and_back() -> None:
    """And behind the last token nothing is left, of the keys nor of their scales."""
    layers, config = 2, engine()
    group = indexed(replace(LATENTS, dtype=torch.uint8, head_size=2 * LATENT), layers)
    config.cache_config.cache_dtype = "fp8"
    source, target = filled(layers, 5, 1), filled(layers, 5, 2)
    geometry = facts_of(config, group, Shape(TALL, 2), Settings("/s", revision="1")).geometry
    shape = Shape(TALL, 2)
    there, back = (block_map(each, group, shape, geometry, orders_of(config, group, each)) for each in (source, target))
    pass_on(there, back, 2 * TALL + 70)
    for name, cache in source.items():
        got = target[name]
        assert all(torch.equal(got[b], cache[a]) for a, b in ((4, 1), (1, 0), (3, 2)))
        rest, wanted = got[3].reshape(-1), cache[0].reshape(-1).clone()
        if name.startswith("indexer"):
            wanted[6 * 128 : TALL * 128] = 0
            wanted[TALL * 128 + 6 * 4 :] = 0
        else:
            wanted[6 * LATENT * 2 :] = 0
        assert torch.equal(rest, wanted), name


def test_heads_with_an_indexer_beside_them() -> None:
    """MiniMax M3's: its heads are shared by ranks, the indexer's keys are on every one."""
    heads = FullAttentionSpec(num_kv_heads=1, head_size=128, head_size_v=128, dtype=torch.bfloat16)
    keys = MLAAttentionSpec(head_size=128)
    config = engine(ranks=4)
    config.model_config.get_total_num_kv_heads = lambda: 4
    found = facts_of(
        config, together(("index", 2, keys), ("l", 3, heads)), Shape(BLOCK, 4), Settings("/s", revision="1")
    )
    geometry = found.geometry
    assert (geometry.layers, geometry.kv_heads, geometry.tensors) == (3, 4, 2)
    assert [str(cache) for cache in geometry.further] == ["2 layers of 1 x 1 x 128 bfloat16"]
    assert found.engine_layout == "vllm cuda HNC + vllm cuda MLA"
    own = rank_geometry(geometry, 4)
    assert [cache.kv_heads for cache in own.caches] == [1, 1]


HEADS, KEYS = (
    FullAttentionSpec(num_kv_heads=2, head_size=128, head_size_v=128, dtype=torch.bfloat16),
    MLAAttentionSpec(head_size=128),
)


def heads_and_keys() -> tuple[SimpleNamespace, SimpleNamespace, KVGeometry]:
    """One of two ranks, of two heads each, and its geometry."""
    config, group = engine(ranks=2), together(("index", 2, KEYS), ("l", 3, HEADS))
    config.model_config.get_total_num_kv_heads = lambda: 4
    facts = facts_of(config, group, Shape(BLOCK, 2), Settings("/s", revision="1"))
    return config, group, rank_geometry(facts.geometry, 2)


def blocks_of_heads_and_keys(device: str = "cpu", *, outermost: str = "heads") -> dict[str, torch.Tensor]:
    """Five blocks of each layer, as vLLM gives them: (block, head, token, key and value), in any order in memory."""
    heads = {f"l.{i}": torch.randn((5, 2, BLOCK, 256), device=device).to(torch.bfloat16) for i in range(3)}
    if outermost == "tokens":
        heads = {name: cache.transpose(1, 2).contiguous().transpose(1, 2) for name, cache in heads.items()}
    return {f"index.{i}": torch.randn((5, BLOCK, 128), device=device).to(torch.bfloat16) for i in range(2)} | heads


def test_blocks_of_heads_with_an_indexer_beside_them() -> None:
    """A page has the heads first, whatever vLLM tells first; behind the last token nothing is left of either."""
    config, group, own = heads_and_keys()
    shape, source, target = Shape(BLOCK, 2), blocks_of_heads_and_keys(), blocks_of_heads_and_keys()
    there, back = (block_map(each, group, shape, own, orders_of(config, group, each)) for each in (source, target))
    heads, keys = there.caches
    assert heads.bases.tolist() == [source[f"l.{i}"].data_ptr() for i in range(3)]
    assert keys.bases.tolist() == [source[f"index.{i}"].data_ptr() for i in range(2)]
    assert (heads.block_bytes, keys.block_bytes) == (BLOCK * 2 * 256 * 2, BLOCK * 128 * 2)
    assert there.page_bytes == own.page_bytes
    pass_on(there, back, 3 * BLOCK + 6)
    for name, cache in source.items():
        got, last = target[name], cache[0].clone()
        last[..., 6:, :] = 0
        assert all(
            torch.equal(got[b], wanted) for b, wanted in ((1, cache[4]), (0, cache[1]), (2, cache[3]), (3, last))
        )


@pytest.mark.parametrize(("outermost", "runs"), [("heads", 2), ("tokens", 1)])
def test_on_gpus_heads_that_are_outermost_have_a_run_each_and_the_indexers_keys_one(outermost: str, runs: int) -> None:
    """A block's addresses are those of no memory here."""
    config, group, own = heads_and_keys()
    caches = blocks_of_heads_and_keys("meta", outermost=outermost)
    found = block_map(caches, group, Shape(BLOCK, 2), own, orders_of(config, group, caches))
    heads, keys = found.caches
    block_bytes, key_bytes = BLOCK * 2 * 256 * 2, BLOCK * 128 * 2
    assert heads.bases.tolist() == [run * block_bytes // runs for run in range(runs)] * 3
    assert heads.strides.tolist() == [block_bytes] * 3 * runs
    assert keys.bases.tolist() == [0] * 2 and keys.strides.tolist() == [key_bytes] * 2
    assert (heads.block_bytes, keys.block_bytes) == (block_bytes // runs, key_bytes) and found.in_token_order
    facts = facts_of(config, group, Shape(BLOCK, 2), Settings("/s", revision="1"))
    assert with_head_runs(facts, config, found, own).geometry.head_runs == runs - 1


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (together(("a", 1, LATENTS), ("b", 1, replace(LATENTS, block_size=32))), "block_size .* is 32 and 64"),
        (together(("a", 1, LATENTS), ("b", 1, SimpleNamespace(block_size=64))), "groups .MLAAttentionSpec, SimpleN"),
        (together(("a", 1, LATENTS), ("b", 1, replace(LATENTS, compress_ratio=4))), "is 4 in layer b.0"),
    ],
)  # fmt: skip
def test_caches_that_cannot_lie_together(group: SimpleNamespace, message: str) -> None:
    with pytest.raises(Unfit, match=message):
        kinds_of(engine(), group)


def test_more_kinds_than_a_page_may_have_are_refused() -> None:
    group = together(*((f"l{width}", 1, replace(LATENTS, head_size=width)) for width in range(64, 73)))
    with pytest.raises(Unfit, match=r"geometry\.further, the number of entries, is 8; it must be 0 to 7"):
        facts_of(engine(), group, Shape(TALL, 1), Settings("/s", revision="1"))
