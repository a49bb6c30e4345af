"""A vLLM engine's facts for the daemon: model, weights, KV geometry, digest chain; and where its blocks lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.client.engine_pools import EnginePools
from kvferry.client.one_rank import OneRank
from kvferry.connectors.blocks import BlockMap
from kvferry.connectors.movers import HostMover, Mover
from kvferry.connectors.scheduler_side import Shape
from kvferry.connectors.settings import Settings
from kvferry.connectors.vllm import order as vllm_order
from kvferry.connectors.vllm.caches import Unfit, draft_of, is_latent, spec_of
from kvferry.connectors.vllm.weights import draft_name, fingerprint, kv_scales, revision_of
from kvferry.proto import common_pb2
from kvferry.radix.digests import root_digest
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.transfer.geometry.namespace import NamespaceFacts
from kvferry.transfer.geometry.rank_lanes import rank_geometry

DEVICES = ("cpu", "cuda")
NOT_SERVED = {
    "pipeline_parallel_size": "a page has all layers of its tokens, and with stages no process has all of them",
    "prefill_context_parallel_size": "a page has all bytes of its tokens' heads on one rank",
    "decode_context_parallel_size": "a page has consecutive tokens, which are dealt out to ranks then",
}


def check_config(vllm_config: Any, kv_cache_config: Any) -> Any:
    """The spec of the one KV cache group. Unfit names what does not fit and what to do."""
    parallel = vllm_config.parallel_config
    for name, needed in NOT_SERVED.items():
        if getattr(parallel, name, 1) != 1:
            raise Unfit(f"{name} is {getattr(parallel, name)}; {needed}: set it to 1, and use tensor_parallel_size")
    spec = spec_of(vllm_config, kv_cache_config)
    draft_of(vllm_config)
    if not vllm_config.cache_config.enable_prefix_caching and vllm_config.model_config.is_multimodal_model:
        raise Unfit(
            "prefix caching is off, and without it vLLM may name images by numbers that other images have elsewhere: "
            "start vLLM with --enable-prefix-caching"
        )
    if vllm_config.device_config.device_type not in DEVICES:
        raise Unfit(
            f"the device is {vllm_config.device_config.device_type!r}; the connector copies memory of the host and of "
            f"NVIDIA's GPUs: it must be one of {', '.join(DEVICES)}"
        )
    # Only so this connector's halves are in one process, and copies can be ended before memory is taken away.
    backend = getattr(parallel, "distributed_executor_backend", None)
    if getattr(vllm_config.model_config, "enable_sleep_mode", False) and backend not in ("uni", "external_launcher"):
        raise Unfit(
            f"sleep mode is on, and distributed_executor_backend is {backend!r}: the KV cache could be taken away "
            "under a copy; start vLLM with --distributed-executor-backend uni, or without --enable-sleep-mode"
        )
    return spec


def dp_of(vllm_config: Any) -> tuple[int, int]:
    """The engine's data-parallel rank, and how many there are. vLLM tells the ranks of a dense model, each an engine
    without others, no more than which one they are."""
    parallel = vllm_config.parallel_config
    return parallel.data_parallel_index, parallel.data_parallel_size


def shape_of(spec: Any, settings: Settings) -> Shape:
    try:
        blocks_per_page = settings.blocks_per_page(spec.block_size)
    except ValueError as error:
        raise Unfit(str(error)) from error
    return Shape(spec.block_size, blocks_per_page)


def facts_of(vllm_config: Any, kv_cache_config: Any, shape: Shape, settings: Settings) -> NamespaceFacts:
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    layers = kv_cache_config.kv_cache_groups[0].layer_names
    dtype = str(spec.dtype).removeprefix("torch.")
    return NamespaceFacts(
        model=fingerprint(vllm_config.model_config),
        revision=revision_of(vllm_config, settings),
        geometry=KVGeometry(
            layers=len(layers),
            kv_heads=kv_heads_of(vllm_config, spec),
            head_dim=spec.head_size,
            dtype=dtype,
            page_size=shape.page_size,
            layout=Layout.ENGINE,
            tensors=1 if is_latent(spec) else 2,
        ),
        digest_algorithm="sha256_cbor",
        root_digest=root_digest(),
        engine_layout=vllm_order.name_of(vllm_config, spec),
        kv_scales=kv_scales(vllm_config),
        speculative=draft_name(vllm_config, settings),
    )


def kv_heads_of(vllm_config: Any, spec: Any) -> int:
    """KV heads of the model, over all ranks. Unfit where a rank's are not its share of them."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    own: int = spec.num_kv_heads
    if ranks == 1 or is_latent(spec):
        return own
    total: int = vllm_config.model_config.get_total_num_kv_heads()
    if own != max(1, total // ranks):
        raise Unfit(
            f"a rank has {own} KV heads, the model {total}, tensor_parallel_size is {ranks}: the connector serves "
            "models whose ranks share the heads evenly"
        )
    return total


def rank_of(vllm_config: Any, engine: str, role: common_pb2.Role) -> OneRank | None:
    """The rank of this process, where the engine has several. In a worker's process."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return None
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return OneRank(get_tensor_model_parallel_rank(), ranks, engine, role)


def rank_geometry_of(vllm_config: Any, facts: NamespaceFacts) -> KVGeometry:
    """The geometry of this rank's part of a page. Unfit where ranks cannot share the heads."""
    try:
        return rank_geometry(facts.geometry, vllm_config.parallel_config.tensor_parallel_size)
    except ValueError as error:
        raise Unfit(str(error)) from error


def with_head_runs(facts: NamespaceFacts, vllm_config: Any, blocks: BlockMap, own: KVGeometry) -> NamespaceFacts:
    """The facts with what the places of its blocks say of the engine's pages: whether each head has one run of bytes in
    a layer. On CPUs it has one in a block. own: the rank's geometry."""
    apart = len(blocks.bases) == own.layers * own.kv_heads
    outermost = vllm_config.device_config.device_type == "cpu" and blocks.blocks_per_page == 1
    return replace(facts, geometry=replace(facts.geometry, head_runs=int(apart or outermost)))


def order_of(vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> NDArray[np.int32]:
    """The token of its block that each byte belongs to, (block bytes,). Unfit where it cannot be found out."""
    group = kv_cache_config.kv_cache_groups[0]
    try:
        if vllm_config.device_config.device_type == "cpu":
            return vllm_order.cpu_order(vllm_config, group.kv_cache_spec)
        return vllm_order.strided_order(_cache_of(kv_caches, group.layer_names[0]))
    except ValueError as error:
        raise Unfit(f"{error}: the connector does not know how this engine's attention keeps its blocks") from error


def mover_of(kv_caches: dict[str, Any], kv_cache_config: Any, blocks: BlockMap) -> Mover:
    """The mover for the memory that the engine's blocks lie in. Unfit where kvferry cannot copy there."""
    device = _cache_of(kv_caches, kv_cache_config.kv_cache_groups[0].layer_names[0]).device
    if device.type == "cpu":
        return HostMover(blocks)
    from kvferry.connectors.gpu_mover import GpuMover

    try:
        return GpuMover(blocks, device)
    except OSError as error:
        raise Unfit(f"kvferry cannot copy on the engine's GPU: {error}") from error


def own_blocks(
    kv_caches: dict[str, Any], kv_cache_config: Any, blocks: BlockMap, geometry: KVGeometry
) -> Callable[[], EnginePools]:
    """Registers the engine's blocks with a daemon, each time that it is called. Unfit where they cannot be."""
    device = _cache_of(kv_caches, kv_cache_config.kv_cache_groups[0].layer_names[0]).device
    if device.type == "cpu":
        raise Unfit("kv_connector_extra_config.pool is 'engine'; blocks in the machine's memory are no other process's")
    from kvferry.connectors.gpu_blocks import registered

    def register() -> EnginePools:
        try:
            return registered(blocks, geometry, device.index or 0)
        except ValueError as error:
            raise Unfit(f"kv_connector_extra_config.pool is 'engine', and {error}: set it to 'daemon'") from error
        except OSError as error:
            raise Unfit(
                f"kv_connector_extra_config.pool is 'engine', and the KV cache cannot be shared: {error}; start vLLM "
                "without sleep mode and expandable segments, or set pool to 'daemon'"
            ) from error

    register()  # it is refused at the start, or never
    return register


def block_map(
    kv_caches: dict[str, Any], kv_cache_config: Any, shape: Shape, geometry: KVGeometry, order: NDArray[np.int32]
) -> BlockMap:
    """The places of the engine's blocks; `geometry`: of the rank; `order`: the token that each byte of a block belongs
    to. On GPUs a page is made run by run (of a head, where heads are outermost in a block), and so the same for blocks
    of any size. Unfit where a block is not one run of bytes, or not of the geometry's size, or layers differ."""
    names = kv_cache_config.kv_cache_groups[0].layer_names
    bases, strides = [], []
    block_bytes = geometry.page_bytes // (len(names) * shape.blocks_per_page)
    caches = {name: _cache_of(kv_caches, name) for name in names}
    first = caches[names[0]]
    blocks = min(map(len, caches.values()))
    elements = geometry.tensors * geometry.head_dim  # of a token and head
    runs = 1 if first.device.type == "cpu" else vllm_order.runs_of(order, shape.block_tokens)
    if not runs:
        raise Unfit(f"layer {names[0]}: the tokens of a block do not lie one behind the other, of all heads or of each")
    for name, cache in caches.items():
        if cache.ndim == 4 and cache.shape[2] < shape.block_tokens and shape.block_tokens % cache.shape[2] == 0:
            raise Unfit(
                f"layer {name}: the attention backend splits blocks of {shape.block_tokens} tokens into such of "
                f"{cache.shape[2]}: start vLLM with --block-size {cache.shape[2]}, on both sides"
            )
        if (
            cache.device != first.device
            or cache.shape[1:] != (geometry.kv_heads, shape.block_tokens, elements)
            or cache.stride()[1:] != first.stride()[1:]
            or not vllm_order.is_one_run(cache)
            or cache[0].nbytes != block_bytes
        ):
            raise Unfit(
                f"layer {name}: its cache on {cache.device} has shape {tuple(cache.shape)}, strides {cache.stride()}; "
                f"a block must be {block_bytes} bytes one behind the other: {geometry.kv_heads} heads, "
                f"{shape.block_tokens} tokens, {elements} elements, in an order and on a device that all "
                "layers have"
            )
        bases += [cache.data_ptr() + run * block_bytes // runs for run in range(runs)]
        strides += [cache.stride(0) * cache.element_size()] * runs
    return BlockMap(
        np.array(bases, dtype=np.int64),
        np.array(strides, dtype=np.int64),
        block_bytes // runs,
        blocks,
        shape.block_tokens,
        shape.blocks_per_page,
        order[: block_bytes // runs],
    )


def _cache_of(kv_caches: dict[str, Any], layer: str) -> Any:
    if layer not in kv_caches:
        raise Unfit(f"layer {layer} has no KV cache of its own; the connector serves models where each has one")
    cache = kv_caches[layer]
    return cache.unsqueeze(1) if cache.ndim == 3 else cache
