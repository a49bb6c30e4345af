"""Facts that are read of vLLM's configuration, and engines that are refused; the configurations here have just that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvferry.connectors.blocks import BlockMap, PoolPages
from kvferry.connectors.movers import HostMover
from kvferry.connectors.scheduler_side import Shape
from kvferry.connectors.settings import Settings
from kvferry.connectors.vllm.caches import CacheKind, Unfit, kinds_of
from kvferry.connectors.vllm.facts import (
    block_map,
    check_config,
    kv_heads_of,
    orders_of,
    own_blocks,
    rank_geometry_of,
    shape_of,
    with_head_runs,
)
from kvferry.connectors.vllm.order import name_of, runs_of, strided_order
from kvferry.connectors.vllm.weights import fingerprint, revision_of, weights_name, weights_revision
from kvferry.radix.digests import root_digest
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.layouts import RankStorage
from kvferry.transfer.geometry.namespace import NamespaceFacts

BLOCK, HEADS, DIM = 32, 3, 64
ORDER = np.arange(HEADS * BLOCK * 2 * DIM, dtype=np.int32).repeat(4) % BLOCK


@dataclass
class FullAttentionSpec:
    block_size: int = BLOCK
    num_kv_heads: int = HEADS
    head_size: int = DIM
    head_size_v: int = DIM
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    pass


@dataclass
class Engine:
    parallel: dict[str, int] = field(default_factory=dict)
    caching: bool = True
    images: bool = False
    device: str = "cpu"
    sleeps: bool = False
    backend: str = "mp"
    policy: str = "fcfs"
    specs: tuple[FullAttentionSpec, ...] = (FullAttentionSpec(),)

    @property
    def vllm(self) -> SimpleNamespace:
        sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **self.parallel}
        return SimpleNamespace(
            parallel_config=SimpleNamespace(**sizes, distributed_executor_backend=self.backend),
            cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=self.caching),
            model_config=SimpleNamespace(is_multimodal_model=self.images, enable_sleep_mode=self.sleeps),
            device_config=SimpleNamespace(device_type=self.device),
            scheduler_config=SimpleNamespace(policy=self.policy),
        )

    @property
    def kv(self) -> SimpleNamespace:
        groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["l0", "l1"]) for spec in self.specs]
        return SimpleNamespace(kv_cache_groups=groups)


def test_an_engine_that_fits() -> None:
    launched, priority = Engine(backend="external_launcher"), Engine(policy="priority", caching=False)
    for engine in (Engine(), Engine(sleeps=True, backend="uni"), launched, priority):
        assert check_config(engine.vllm, engine.kv) == BLOCK


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Engine(parallel={"pipeline_parallel_size": 4}), "pipeline_parallel_size is 4; .*: set it to 1"),
        (Engine(parallel={"decode_context_parallel_size": 2}), "decode_context_parallel_size is 2; .*: set it to 1"),
        (Engine(parallel={"prefill_context_parallel_size": 2}), "prefill_context_parallel_size is 2; .*: set it to 1"),
        (Engine(caching=False, images=True), "prefix caching is off, .* --enable-prefix-caching"),
        (Engine(sleeps=True), "sleep mode is on, .* is 'mp': .* --distributed-executor-backend uni, or without"),
        (
            Engine(parallel={"tensor_parallel_size": 2}, backend="external_launcher"),
            "is 'external_launcher' and tensor_parallel_size 2: .* --distributed-executor-backend mp",
        ),
        (Engine(policy="priority"), "scheduling_policy is 'priority', .* --no-enable-prefix-caching, or with .* fcfs"),
        (Engine(device="xpu"), "the device is 'xpu'; .* one of cpu, cuda"),
        (
            Engine(specs=(FullAttentionSpec(), SlidingWindowSpec())),
            "2 KV cache groups .FullAttentionSpec, Sliding",
        ),
        (Engine(specs=(SlidingWindowSpec(),)), "1 KV cache groups .SlidingWindowSpec"),
        (Engine(specs=(FullAttentionSpec(head_size_v=32),)), "keys have 64 elements a head, values 32"),
    ],
)
def test_engines_that_are_refused(engine: Engine, message: str) -> None:
    with pytest.raises(Unfit, match=message):
        check_config(engine.vllm, engine.kv)


def test_windows_whose_layers_keep_every_token_are_served() -> None:
    """Windows beside full attention are one group so, with vLLM's --disable-hybrid-kv-cache-manager."""
    engine = Engine(specs=(FullAttentionSpec(sliding_window=128),))
    assert check_config(engine.vllm, engine.kv) == BLOCK
    assert [kind.layers for kind in kinds_of(engine.vllm, engine.kv)] == [("l0", "l1")]


def test_blocks_that_no_daemon_can_have_are_refused() -> None:
    """What is on is said by its name. Of expandable segments and memory pools: tests/csrc/test_shared_blocks.py."""
    blocks = SimpleNamespace()

    def register(device: str, engine: Engine) -> None:
        caches = {name: SimpleNamespace(device=torch.device(device), ndim=4) for name in ("l0", "l1")}
        own_blocks(engine.vllm, caches, engine.kv, cast(Any, blocks), geometry(1))

    with pytest.raises(Unfit, match="pool is 'engine'; blocks in the machine's memory are no other process's"):
        register("cpu", Engine())
    with pytest.raises(Unfit, match=r"pool is 'engine', and sleep mode is on: .* without --enable-sleep-mode, or set"):
        register("cuda:0", Engine(device="cuda", sleeps=True, backend="uni"))


def test_a_page_that_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(Unfit, match="page_size is 40"):
        shape_of(BLOCK, Settings("/s", page_size=40))


def geometry(per_page: int) -> KVGeometry:
    return KVGeometry(2, HEADS, DIM, "float32", BLOCK * per_page, Layout.ENGINE)


@pytest.mark.parametrize("per_page", [1, 2])
def test_where_the_blocks_of_cpu_attention_lie(per_page: int) -> None:
    caches = {name: torch.zeros(10, HEADS, BLOCK, 2 * DIM) for name in ("l1", "l0")}
    shape = Shape(BLOCK, per_page)
    found = block_map(caches, Engine().kv, shape, geometry(per_page), [ORDER])
    assert found.page_bytes == geometry(per_page).page_bytes
    assert (found.blocks, found.block_bytes) == (10, HEADS * BLOCK * 2 * DIM * 4)
    assert found.bases.tolist() == [caches["l0"].data_ptr(), caches["l1"].data_ptr()]
    assert found.strides.tolist() == [found.block_bytes] * 2


def test_layers_that_share_one_tensor_are_found_by_their_strides() -> None:
    whole = torch.zeros(10, 2, HEADS, BLOCK, 2 * DIM)
    caches = {"l0": whole[:, 0], "l1": whole[:, 1]}
    found = block_map(caches, Engine().kv, Shape(BLOCK, 1), geometry(1), [ORDER])
    assert found.strides.tolist() == [2 * found.block_bytes] * 2
    assert found.bases[1] - found.bases[0] == found.block_bytes


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.zeros(10, HEADS, BLOCK, DIM), "must be 49152 bytes"),
        (torch.zeros(10, BLOCK, HEADS, 2 * DIM).transpose(1, 2), "strides"),
        (torch.zeros(10, 2, HEADS, BLOCK, DIM), "3 heads, 32 tokens, 128 elements"),
    ],
)
def test_blocks_that_are_no_run_of_bytes_are_refused(cache: torch.Tensor, message: str) -> None:
    with pytest.raises(Unfit, match=message):
        block_map({"l0": cache, "l1": cache}, Engine().kv, Shape(BLOCK, 1), geometry(1), [ORDER])


def test_layers_in_another_order_or_elsewhere_are_refused() -> None:
    cache = torch.zeros(10, HEADS, BLOCK, 2 * DIM)
    for other in (torch.zeros(10, HEADS, BLOCK, 2 * DIM, device="meta"), torch.zeros(10, HEADS, BLOCK + 1, 2 * DIM)):
        with pytest.raises(Unfit, match=r"layer l1: its cache .* that all layers of its kind have"):
            block_map({"l0": cache, "l1": other}, Engine().kv, Shape(BLOCK, 1), geometry(1), [ORDER])
    gpu = torch.zeros(10, HEADS, BLOCK, 2 * DIM, device="meta")
    other = torch.zeros(10, BLOCK, HEADS, 2 * DIM, device="meta").transpose(1, 2)
    with pytest.raises(Unfit, match=r"layer l1: its cache .* that all layers of its kind have"):
        block_map({"l0": gpu, "l1": other}, Engine().kv, Shape(BLOCK, 1), geometry(1), [ORDER])


def test_blocks_that_the_backend_splits_are_refused_with_the_size_to_choose() -> None:
    caches = {name: torch.zeros(20, HEADS, BLOCK // 2, 2 * DIM) for name in ("l0", "l1")}
    with pytest.raises(Unfit, match="start vLLM with --block-size 16, on both sides"):
        block_map(caches, Engine().kv, Shape(BLOCK, 1), geometry(1), [ORDER])


@pytest.mark.parametrize("name", ["num_head_slots", "state_content_bytes"])
def test_keys_and_values_that_are_packed_in_another_way_are_refused(name: str) -> None:
    spec = FullAttentionSpec()
    setattr(spec, name, 2)
    with pytest.raises(Unfit, match=f"{name} of the KV cache is 2: .* choose another by --attention-backend"):
        check_config(Engine(specs=(spec,)).vllm, Engine(specs=(spec,)).kv)


@pytest.mark.parametrize("inside", ["HNC", "NHC"])
def test_of_blocks_on_a_gpu_any_order_that_strides_can_tell_is_taken(inside: str) -> None:
    """Tensors without memory have strides too."""
    sizes = {"H": HEADS, "N": BLOCK, "C": 2 * DIM}
    whole = torch.zeros(2, 10, *(sizes[letter] for letter in inside), device="meta")
    caches = {f"l{i}": whole[i].permute(0, *(1 + inside.index(letter) for letter in "HNC")) for i in range(2)}
    order = strided_order(caches["l0"])
    found = block_map(caches, Engine(device="cuda").kv, Shape(BLOCK, 1), geometry(1), [order])
    runs = HEADS if inside == "HNC" else 1
    assert (found.blocks, found.strides.tolist()) == (10, [found.block_bytes * runs] * 2 * runs)
    assert np.diff(found.bases)[: runs - 1].tolist() == [found.block_bytes] * (runs - 1)
    assert found.order.tolist() == np.arange(BLOCK).repeat(found.block_bytes // BLOCK).tolist()
    token_of = order.reshape([sizes[letter] for letter in inside] + [4])
    tokens = np.moveaxis(token_of, inside.index("N"), 0).reshape(BLOCK, -1)
    assert (tokens == np.arange(BLOCK)[:, None]).all()


def page_on_a_gpu(inside: str, tokens: torch.Tensor, block_tokens: int) -> tuple[bytes, BlockMap]:
    """The page of `tokens`, (tokens, heads, elements), made of blocks of that many, and the places that a GPU's would
    have."""
    heads, blocks = tokens.shape[1], BLOCK // block_tokens
    sizes = {"H": heads, "N": block_tokens, "C": 2 * DIM}
    cache = torch.zeros(blocks, *(sizes[letter] for letter in inside))
    inner = [1 + inside.index(letter) for letter in "HNC"]
    cache.permute(0, *inner)[:] = tokens.view(blocks, block_tokens, heads, 2 * DIM).transpose(1, 2)
    gpu = {"l0": cache.to("meta").permute(0, *inner)}
    shape, kv = Shape(block_tokens, blocks), KVGeometry(1, heads, DIM, "float32", BLOCK, Layout.ENGINE)
    group = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["l0"])])
    found = block_map(gpu, group, shape, kv, [strided_order(gpu["l0"])])
    there = BlockMap(
        found.bases + cache.data_ptr(), found.strides, found.block_bytes, blocks, block_tokens, blocks, found.order
    )
    memory = np.zeros(found.page_bytes, np.uint8)
    pool = PoolPages.of(memory, 1)
    HostMover(there).to_pages(pool, there.places(pool, [0], range(blocks), 0, BLOCK), None)
    return memory.tobytes(), there


@pytest.mark.parametrize("inside", ["HNC", "NHC"])
def test_on_a_gpu_a_page_is_the_same_whatever_the_size_of_a_block(inside: str) -> None:
    tokens = torch.rand(BLOCK, HEADS, 2 * DIM)
    assert len({page_on_a_gpu(inside, tokens, size)[0] for size in (BLOCK, BLOCK // 2, BLOCK // 8)}) == 1


def facts_of_heads(heads: int) -> NamespaceFacts:
    geometry = KVGeometry(1, heads, DIM, "float32", BLOCK, Layout.ENGINE)
    return NamespaceFacts("m", "1", geometry, "sha256_cbor", root_digest(), engine_layout="x")


def test_pages_of_which_heads_are_outermost_say_so_and_are_cut_as_ranks_have_them() -> None:
    """Of four heads on one rank and on two; the other blocks' sizes are the engines' own."""
    tokens, vllm = torch.rand(BLOCK, 4, 2 * DIM), Engine(device="cuda").vllm
    whole, blocks = page_on_a_gpu("HNC", tokens, BLOCK // 4)
    facts = facts_of_heads(4)
    facts = with_head_runs(facts, vllm, blocks, facts.geometry)
    assert facts.geometry.head_runs == 1
    storage = RankStorage.make(facts.geometry, StorageOrder.PAGE_MAJOR, 1)
    for rank in range(2):
        heads = slice(2 * rank, 2 * rank + 2)
        own, there = page_on_a_gpu("HNC", tokens[:, heads].contiguous(), BLOCK)
        rows = storage.rows(heads.start, 2)
        cut = b"".join(whole[at : at + rows.fragment_bytes] for at in rows.fragments_of([0]).ravel().tolist())
        assert cut == own
        ranks = Engine(device="cuda", parallel={"tensor_parallel_size": 2}).vllm
        part = rank_geometry_of(ranks, facts_of_heads(4))
        assert part.kv_heads == 2
        assert with_head_runs(facts_of_heads(4), ranks, there, part).geometry.head_runs == 1


def test_pages_in_which_a_tokens_heads_are_adjacent_say_so() -> None:
    vllm, facts = Engine(device="cuda").vllm, facts_of_heads(4)
    for size in (BLOCK, BLOCK // 4):
        _, blocks = page_on_a_gpu("NHC", torch.rand(BLOCK, 4, 2 * DIM), size)
        assert with_head_runs(facts, vllm, blocks, facts.geometry).geometry.head_runs == 0


@pytest.mark.parametrize("per_page", [1, 2])
def test_on_a_cpu_heads_are_outermost_in_a_page_of_one_block(per_page: int) -> None:
    caches = {name: torch.zeros(10, HEADS, BLOCK, 2 * DIM) for name in ("l1", "l0")}
    facts = replace(facts_of_heads(HEADS), geometry=geometry(per_page))
    blocks = block_map(caches, Engine().kv, Shape(BLOCK, per_page), facts.geometry, [ORDER])
    found = with_head_runs(facts, Engine().vllm, blocks, facts.geometry).geometry
    assert found.head_runs == (1 if per_page == 1 else 0)


def of_ranks(ranks: int, total: int) -> SimpleNamespace:
    found = Engine(parallel={"tensor_parallel_size": ranks}).vllm
    found.model_config.get_total_num_kv_heads = lambda: total
    return found


def test_heads_are_those_of_all_ranks() -> None:
    def heads(ranks: int, total: int, own: int) -> int:
        return kv_heads_of(of_ranks(ranks, total), FullAttentionSpec(num_kv_heads=own))

    assert heads(1, 99, 3) == 3, "what the one rank has"
    assert heads(2, 8, 4) == 8 and heads(8, 2, 1) == 2
    with pytest.raises(Unfit, match="a rank has 3 KV heads, the model 8, tensor_parallel_size is 2"):
        heads(2, 8, 3)
    with pytest.raises(Unfit, match=r"ranks is 3; it must divide geometry\.kv_heads = 4"):
        rank_geometry_of(of_ranks(3, 4), facts_of_heads(4))


@pytest.mark.parametrize("order", [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0], [1, 1, 0, 0]])
def test_runs_have_their_tokens_one_behind_the_other(order: list[int]) -> None:
    found = runs_of(np.array(order, np.int32), 2)
    assert found == {(0, 1, 0, 1): 2, (0, 0, 1, 1): 1}.get(tuple(order), 0)


def test_engines_have_the_same_name_where_a_block_has_the_same_bytes() -> None:
    def name(layout: str, cache_dtype: str = "auto") -> str:
        config = Engine(device="cuda").vllm
        config.cache_config.cache_dtype = cache_dtype
        config.cache_config.get_resolved_kv_cache_layout = lambda: SimpleNamespace(name=layout)
        return name_of(config, [CacheKind(FullAttentionSpec(), ("l0",))])

    assert name("LBNHC") == name("BLNHC") == "vllm cuda NHC"
    assert len({name("LBNHC"), name("LBHNC"), name("LBNHC", "fp8_e4m3"), name("LBNHC", "fp8_e5m2")}) == 4


def test_vllm_0_26_is_asked_for_its_order_with_its_configuration_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it must be in the scheduler's process of an engine of several ranks."""
    config = Engine(device="cuda").vllm
    config.cache_config = SimpleNamespace(cache_dtype="auto")
    current: list[Any] = []

    @contextmanager
    def set_current_vllm_config(given: Any) -> Iterator[None]:
        current.append(given)
        yield
        current.pop()

    def get_kv_cache_layout() -> str:
        assert current == [config]
        return "HND"

    fakes = {"vllm.config": {"set_current_vllm_config": set_current_vllm_config}}
    fakes["vllm.v1.attention.backends.utils"] = {"get_kv_cache_layout": get_kv_cache_layout}
    for name, members in fakes.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    assert name_of(config, [CacheKind(FullAttentionSpec(), ("l0",))]) == "vllm cuda HNC"


@pytest.mark.parametrize("cache", [torch.zeros(10, HEADS, 2, BLOCK, DIM), torch.zeros(10, 5)])
def test_an_order_that_strides_do_not_tell_is_refused(cache: torch.Tensor) -> None:
    with pytest.raises(Unfit, match="does not know how this engine's attention keeps its blocks"):
        orders_of(Engine(device="cuda").vllm, Engine().kv, {"l0": cache})


def test_a_layer_without_a_cache_is_refused() -> None:
    cache = torch.zeros(10, HEADS, BLOCK, 2 * DIM)
    with pytest.raises(Unfit, match="layer l1 has no KV cache"):
        block_map({"l0": cache}, Engine().kv, Shape(BLOCK, 1), geometry(1), [ORDER])


def test_models_with_longrope_are_named_by_the_factors_that_turn_their_keys() -> None:
    def name(length: int, rope_type: str) -> str:
        told = {"rope_scaling": {"rope_type": rope_type}, "original_max_position_embeddings": 4096}
        config = SimpleNamespace(to_dict=lambda: told)
        return fingerprint(SimpleNamespace(hf_config=config, max_model_len=length, dtype=torch.bfloat16))

    assert name(1024, "longrope") == name(4096, "longrope") == name(8192, "longrope").replace("-long", "-short")
    assert name(4096, "yarn") == name(8192, "yarn") and name(4096, "yarn").endswith("bfloat16")


def test_weights_that_differ_anywhere_have_another_revision(tmp_path: Path) -> None:
    data = bytearray(range(256)) * 4096
    (tmp_path / "model.safetensors").write_bytes(data)
    first = weights_revision(str(tmp_path))
    assert weights_revision(str(tmp_path)) == first
    data[12345] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    assert weights_revision(str(tmp_path)) != first


def downloaded(cache: Path, commit: str, weights: bytes, branch: str = "main") -> Path:
    """As huggingface_hub lays out what it has downloaded."""
    root = cache / "models--org--a"
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / branch).write_text(commit)
    return folder


def test_the_weights_of_a_name_are_those_that_were_downloaded(tmp_path: Path) -> None:
    first, second = "1" * 40, "2" * 40
    folder = downloaded(tmp_path, first, b"old weights")
    downloaded(tmp_path, second, b"new weights", "fixed")
    assert weights_revision("org/a", None, str(tmp_path)) == weights_revision(str(folder))
    assert weights_revision("org/a", second, str(tmp_path)) == weights_revision("org/a", "fixed", str(tmp_path))
    assert weights_revision("org/a", "fixed", str(tmp_path)) != weights_revision("org/a", first, str(tmp_path))
    (tmp_path / "models--org--a" / "refs" / "main").write_text(second)
    assert weights_revision("org/a", None, str(tmp_path)) == weights_revision("org/a", second, str(tmp_path))
    assert weights_revision(str(folder / "model.safetensors")) == weights_revision(str(folder))


def test_weights_that_nothing_names_are_refused_and_a_commit_names_them(tmp_path: Path) -> None:
    commits = {weights_revision("org/a", digit * 40, str(tmp_path)) for digit in "ab"}
    assert len({*commits, weights_revision("org/b", "a" * 40, str(tmp_path))}) == 3
    for name, revision in (("org/a", None), ("org/a", "main"), ("org/a", "abcdef0"), ("s3://bucket/model", None)):
        with pytest.raises(Unfit, match=r"no weight files of model .*extra_config.revision .* full commit hash"):
            weights_revision(name, revision, str(tmp_path))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(Unfit, match=r"extra_config.revision to a name of the weights, the same on both sides$"):
        weights_revision(str(empty), "a" * 40)


def test_the_revision_that_is_configured_goes_before_what_is_found(tmp_path: Path) -> None:
    vllm = Engine().vllm
    vllm.model_config = SimpleNamespace(model="org/a", revision=None)
    vllm.load_config = SimpleNamespace(download_dir=str(tmp_path))
    with pytest.raises(Unfit, match="no weight files"):
        revision_of(vllm, Settings("/s"))
    folder = downloaded(tmp_path, "1" * 40, b"weights")
    assert revision_of(vllm, Settings("/s")) == weights_revision(str(folder))
    assert revision_of(vllm, Settings("/s", revision="mine")) == "mine"
    vllm.load_config.load_format = "dummy"
    assert revision_of(vllm, Settings("/s", revision="mine")) == "mine"
    with pytest.raises(Unfit, match=r"load_format is dummy, .* set kv_connector_extra_config\.revision"):
        revision_of(vllm, Settings("/s"))


def test_a_file_names_the_weights_from_a_reset_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "weights"
    settings = Settings("/s", weights_file=str(file))
    assert weights_name(Settings("/s")) == "" and not caplog.records
    assert weights_name(settings) == "" and "cannot be read" in caplog.text
    file.write_text("step 7\n")
    assert weights_name(settings) == "step 7"
    file.write_bytes(b"\xff")
    assert weights_name(settings) == ""
    file.write_text("7" * 129)
    assert weights_name(settings) == "" and "has 129 characters or more; the bound is 128" in caplog.text
