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

from kvferry.connectors.scheduler_side import Shape
from kvferry.connectors.settings import Settings
from kvferry.connectors.vllm.caches import Unfit, draft_of, looks_ahead, spec_of
from kvferry.connectors.vllm.facts import block_map, facts_of, order_of
from kvferry.connectors.vllm.weights import draft_name, kv_scales, scales_in
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.transfer.geometry.namespace import differences
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


@dataclass
class FullAttentionSpec:
    block_size: int = BLOCK
    num_kv_heads: int = 2
    head_size: int = 64
    head_size_v: int = 64
    dtype: torch.dtype = torch.uint8


NAMES = [f"l{i}" for i in range(LAYERS)]


def kv(*specs: object) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=NAMES) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def model(folder: object = "/none", **config: object) -> SimpleNamespace:
    told = {"model_type": "deepseek_v3", **config}
    return SimpleNamespace(
        model=str(folder), revision=None, dtype=torch.bfloat16, quantization=None,
        hf_config=SimpleNamespace(to_dict=lambda: told),
        get_total_num_kv_heads=lambda: 128,
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
        (MLAAttentionSpec(), with_dtype("fp8_ds_mla"), "kv_cache_dtype is 'fp8_ds_mla', which packs"),
        (FullAttentionSpec(), with_dtype("nvfp4"), "kv_cache_dtype is 'nvfp4'"),
        (FullAttentionSpec(), with_dtype("int8_per_token_head"), "kv_cache_dtype is 'int8_per_token_head'"),
        (FullAttentionSpec(), with_dtype("fp8", calculate_kv_scales=True), "without --calculate-kv-scales"),
        (FullAttentionSpec(), with_dtype("fp8", kv_cache_dtype_skip_layers=["3"]), "skip_layers is .'3'."),
    ],
)  # fmt: skip
def test_caches_that_are_refused(spec: object, config: Any, message: str) -> None:
    with pytest.raises(Unfit, match=message):
        spec_of(config, kv(spec))


def test_a_token_of_deepseek_v3_has_its_latents_bytes_on_the_wire_and_in_the_host_tier() -> None:
    config = engine(ranks=8)
    found = facts_of(config, kv(spec_of(config, kv(MLAAttentionSpec()))), Shape(BLOCK, 4), Settings("/s", revision="1"))
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
    order = order_of(config, group, caches)
    assert order.tolist() == np.arange(BLOCK).repeat(LATENT * 2).tolist()
    found = block_map(caches, group, Shape(BLOCK, 2), geometry, order)
    assert found.bases.tolist() == [caches[name].data_ptr() for name in NAMES]
    assert (found.block_bytes, found.page_bytes) == (BLOCK * LATENT * 2, 2 * BLOCK * 70_272) and found.in_token_order
    short = {**caches, "l3": torch.zeros(5, BLOCK, 512, dtype=torch.bfloat16)}
    with pytest.raises(Unfit, match=r"layer l3: its cache .* 1 heads, 16 tokens, 576 elements"):
        block_map(short, group, Shape(BLOCK, 2), geometry, order)


def weights(folder: Path, scale: float) -> Path:
    """A checkpoint of one matrix, with a scale of the KV cache behind it."""
    folder.mkdir()
    tensors = {"w": np.ones(4, np.float32), "model.layers.0.self_attn.k_proj.k_scale": np.array([scale], np.float32)}
    header, data = {}, b""
    for name, value in tensors.items():
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": [len(data), len(data) + value.nbytes]}
        data += value.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def test_engines_of_other_scales_share_no_page(tmp_path: Path) -> None:
    folders = [weights(tmp_path / name, scale) for name, scale in (("a", 0.5), ("b", 0.5), ("c", 0.25))]
    assert scales_in(folders[0] / "model.safetensors") == {
        "model.layers.0.self_attn.k_proj.k_scale": b"F32" + np.float32(0.5).tobytes()
    }
    facts = []
    for folder in folders:
        config = with_dtype("fp8_e4m3")
        config.model_config.model = str(folder)
        facts.append(facts_of(config, kv(FullAttentionSpec()), Shape(BLOCK, 1), Settings("/s", revision="1")))
    assert facts[0].kv_scales and facts[0].id == facts[1].id and "fp8_e4m3" in facts[0].engine_layout
    (difference,) = differences(facts[0], facts[2])
    assert difference.field == "kv_scales" and "serve a checkpoint with the same scales" in str(difference)
    assert kv_scales(engine(folders[0])) == ""  # nothing is quantized


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
    assert names[0].startswith("eagle3 vllm-deepseek_v3-") and names[0] != names[1] and names[2] == ""
    facts = [
        facts_of(config, kv(MLAAttentionSpec()), Shape(BLOCK, 1), Settings("/s", revision="1"))
        for config in configs[1:]
    ]
    (difference,) = differences(*facts)
    assert difference.field == "speculative" and "the same --speculative-config" in str(difference)
    assert [looks_ahead(config) for config in configs] == [True, True, False]


def test_which_draft_models_have_kv() -> None:
    assert draft_of(engine(draft=drafts("ngram"))) is None
    assert not looks_ahead(engine(draft=drafts("draft_model"))) and looks_ahead(engine(draft=drafts("mtp")))
    with pytest.raises(Unfit, match=r"speculative_config\.method is 'dflash'; the connector serves eagle, eagle3, mtp"):
        draft_of(engine(draft=drafts("dflash")))


def test_one_group_of_one_kind() -> None:
    for specs in ((MLAAttentionSpec(), FullAttentionSpec()), (replace(MLAAttentionSpec()), MLAAttentionSpec())):
        with pytest.raises(Unfit, match=r"the model has 2 KV cache groups .* of equal sizes"):
            spec_of(engine(), kv(*specs))
