"""A vLLM engine's facts for the daemon: model, weights, KV geometry, digest chain; and where its blocks lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from kvferry.connectors.vllm.caches import CacheKind, Unfit, draft_of, is_latent, kinds_in, kinds_of
from kvferry.connectors.vllm.weights import draft_name, fingerprint, kv_scales, revision_of
from kvferry.proto import common_pb2
from kvferry.radix.digests import root_digest
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.transfer.geometry.namespace import NamespaceFacts, differences
from kvferry.transfer.geometry.rank_lanes import rank_geometry

DEVICES = ("cpu", "cuda")
NOT_SERVED = {
    "pipeline_parallel_size": "a page has all layers of its tokens, and with stages no process has all of them",
    "prefill_context_parallel_size": "a page has all bytes of its tokens' heads on one rank",
    "decode_context_parallel_size": "a page has consecutive tokens, which are dealt out to ranks then",
}


def check_config(vllm_config: Any, kv_cache_config: Any) -> int:
    """The tokens of a block, by the worker's half, which is told the kinds of all layers' caches. Unfit names what does
    not fit and what to do."""
    block_tokens = check_engine(vllm_config, kv_cache_config)
    kinds_of(vllm_config, kv_cache_config)
    return block_tokens


def check_engine(vllm_config: Any, kv_cache_config: Any) -> int:
    """The tokens of a block, as either half can judge: of layers with unlike caches the scheduler's is told one
    layer's."""
    parallel = vllm_config.parallel_config
    for name, needed in NOT_SERVED.items():
        if getattr(parallel, name, 1) != 1:
            raise Unfit(f"{name} is {getattr(parallel, name)}; {needed}: set it to 1, and use tensor_parallel_size")
    kinds = kinds_in(kv_cache_config)
    draft_of(vllm_config)
    if not vllm_config.cache_config.enable_prefix_caching and vllm_config.model_config.is_multimodal_model:
        raise Unfit(
            "prefix caching is off, and without it vLLM may name images by numbers that other images have elsewhere: "
            "start vLLM with --enable-prefix-caching"
        )
    _check_policy(vllm_config)
    if vllm_config.device_config.device_type not in DEVICES:
        raise Unfit(
            f"the device is {vllm_config.device_config.device_type!r}; the connector copies memory of the host and of "
            f"NVIDIA's GPUs: it must be one of {', '.join(DEVICES)}"
        )
    backend = getattr(parallel, "distributed_executor_backend", None)
    if backend == "external_launcher" and parallel.tensor_parallel_size > 1:
        raise Unfit(
            f"distributed_executor_backend is {backend!r} and tensor_parallel_size {parallel.tensor_parallel_size}: "
            "each rank has a scheduler of its own, and they would hear of one load in different steps; start vLLM "
            "with --distributed-executor-backend mp"
        )
    # Only so this connector's halves are in one process, and copies can be ended before memory is taken away.
    if getattr(vllm_config.model_config, "enable_sleep_mode", False) and backend not in ("uni", "external_launcher"):
        raise Unfit(
            f"sleep mode is on, and distributed_executor_backend is {backend!r}: the KV cache could be taken away "
            "under a copy; start vLLM with --distributed-executor-backend uni, or without --enable-sleep-mode"
        )
    return int(kinds[0].spec.block_size)


def _check_policy(vllm_config: Any) -> None:
    """Unfit: vLLM (seen in 0.26) may, with priorities, preempt a request that it has given blocks in the same step:
    they are never computed, and its prefix cache finds them all the same."""
    policy = getattr(getattr(vllm_config, "scheduler_config", None), "policy", "fcfs")
    if policy == "priority" and vllm_config.cache_config.enable_prefix_caching:
        raise Unfit(
            "scheduling_policy is 'priority', with which vLLM's prefix cache may have blocks that nobody computed: "
            "start vLLM with --no-enable-prefix-caching, or with --scheduling-policy fcfs"
        )


def dp_of(vllm_config: Any) -> tuple[int, int]:
    """The engine's data-parallel rank, and how many there are. vLLM tells the ranks of a dense model, each an engine
    without others, no more than which one they are."""
    parallel = vllm_config.parallel_config
    return parallel.data_parallel_index, parallel.data_parallel_size


def shape_of(block_tokens: int, settings: Settings) -> Shape:
    try:
        blocks_per_page = settings.blocks_per_page(block_tokens)
    except ValueError as error:
        raise Unfit(str(error)) from error
    return Shape(block_tokens, blocks_per_page)


def facts_of(vllm_config: Any, kv_cache_config: Any, shape: Shape, settings: Settings) -> NamespaceFacts:
    kinds = kinds_in(kv_cache_config)
    return NamespaceFacts(
        model=fingerprint(vllm_config.model_config),
        revision=revision_of(vllm_config, settings),
        geometry=_geometry_of(vllm_config, kinds, shape.page_size),
        digest_algorithm="sha256_cbor",
        root_digest=root_digest(),
        engine_layout=vllm_order.name_of(vllm_config, kinds),
        kv_scales=kv_scales(vllm_config),
        speculative=draft_name(vllm_config, settings),
    )


def agreed(told: Mapping[int, NamespaceFacts]) -> NamespaceFacts:
    """The facts of all ranks of an engine, by rank. Unfit names what is not the same on all."""
    least = min(told)
    first = told[least]
    for rank, facts in sorted(told.items()):
        if unlike := "; ".join(
            f"{each.field} is {each.theirs}, {each.ours} on rank {least}" for each in differences(first, facts)
        ):
            raise Unfit(
                f"on rank {rank} {unlike}: give all ranks of an engine the same files of the model, the same vLLM and "
                "the same kvferry"
            )
    return first


def _geometry_of(vllm_config: Any, kinds: Sequence[CacheKind], page_size: int) -> KVGeometry:
    first, *further = (shape for kind in kinds for shape in kind.shapes(kv_heads_of(vllm_config, kind.spec)))
    try:
        return KVGeometry(
            layers=first.layers,
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            dtype=first.dtype,
            page_size=page_size,
            layout=Layout.ENGINE,
            tensors=first.tensors,
            further=tuple(further),
        )
    except ValueError as error:
        raise Unfit(f"a page cannot have the KV caches of this model: {error}") from error


def kv_heads_of(vllm_config: Any, spec: Any) -> int:
    """KV heads of the layers, over all ranks. Unfit where a rank's are not its share of them, or a draft model has
    another number than a model with heads of its own: a page's heads are dealt out to ranks as the model's are."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    own: int = spec.num_kv_heads
    if ranks == 1 or is_latent(spec):
        return own
    whose, total = _heads_over_all(vllm_config, ranks)
    if own != max(1, total // ranks):
        raise Unfit(
            f"a rank has {own} KV heads, {whose} {total}, tensor_parallel_size is {ranks}: the connector serves "
            "models whose ranks share the heads evenly"
        )
    return total


def _heads_over_all(vllm_config: Any, ranks: int) -> tuple[str, int]:
    """The owner of the layers with KV heads, and how many it has over all ranks, of which there are several."""
    model, draft = vllm_config.model_config, draft_of(vllm_config)
    total: int = model.get_total_num_kv_heads()
    if draft is None:
        return "the model", total
    drafts: int = draft.draft_model_config.get_total_num_kv_heads()
    if model.use_mla:  # the model's own layers have latents, whatever number of heads it says
        return "the draft model", drafts
    if drafts != total:
        raise Unfit(
            f"the draft model has {drafts} KV heads, the model {total}, tensor_parallel_size is {ranks}: on several "
            "ranks the connector serves draft models of as many; set tensor_parallel_size to 1, or choose another"
        )
    return "the model", total


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
    pairs = zip(blocks.caches, own.caches, strict=True)
    apart = all(len(cache.bases) == part.layers * part.kv_heads for cache, part in pairs)
    outermost = vllm_config.device_config.device_type == "cpu" and blocks.blocks_per_page == 1
    return replace(facts, geometry=replace(facts.geometry, head_runs=int(apart or outermost)))


def orders_of(vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> list[NDArray[np.int32]]:
    """The token of its block that each byte belongs to, (block bytes,), of each kind of cache. Unfit where it cannot be
    found out."""
    try:
        return [_order_of(vllm_config, kind, kv_caches) for kind in kinds_in(kv_cache_config)]
    except ValueError as error:
        raise Unfit(f"{error}: the connector does not know how this engine's attention keeps its blocks") from error


def _order_of(vllm_config: Any, kind: CacheKind, kv_caches: dict[str, Any]) -> NDArray[np.int32]:
    if kind.is_index_with_scales:
        each = np.arange(kind.spec.block_size, dtype=np.int32)
        return np.concatenate([each.repeat(width) for width in kind.widths])
    if vllm_config.device_config.device_type == "cpu" and not is_latent(kind.spec):
        return vllm_order.cpu_order(vllm_config, kind.spec)
    return vllm_order.strided_order(_cache_of(kv_caches, kind.layers[0]))


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
    vllm_config: Any, kv_caches: dict[str, Any], kv_cache_config: Any, blocks: BlockMap, geometry: KVGeometry
) -> Callable[[], EnginePools]:
    """Registers the engine's blocks with a daemon, each time that it is called. Unfit where they cannot be."""
    device = _cache_of(kv_caches, kv_cache_config.kv_cache_groups[0].layer_names[0]).device
    if device.type == "cpu":
        raise Unfit("kv_connector_extra_config.pool is 'engine'; blocks in the machine's memory are no other process's")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise Unfit(
            "kv_connector_extra_config.pool is 'engine', and sleep mode is on: the KV cache is taken away while vLLM "
            "sleeps, and the daemon has it mapped; start vLLM without --enable-sleep-mode, or set pool to 'daemon'"
        )
    from kvferry.connectors.gpu_blocks import registered

    def register() -> EnginePools:
        try:
            return registered(blocks, geometry, device.index or 0)
        except ValueError as error:
            raise Unfit(f"kv_connector_extra_config.pool is 'engine', and {error}: set it to 'daemon'") from error
        except OSError as error:
            raise Unfit(
                f"kv_connector_extra_config.pool is 'engine', and the KV cache cannot be shared: {error}; or set pool "
                "to 'daemon'"
            ) from error

    register()  # it is refused at the start, or never
    return register


def block_map(
    kv_caches: dict[str, Any],
    kv_cache_config: Any,
    shape: Shape,
    geometry: KVGeometry,
    orders: Sequence[NDArray[np.int32]],
) -> BlockMap:
    """The places of the engine's blocks; `geometry`: of the rank; `orders`: of each kind of cache, the token that each
    byte of a block belongs to. On GPUs a page is made run by run (of a head, where heads are outermost in a block), and
    so the same for blocks of any size. Unfit where a block is not one run of bytes, or not of the geometry's size, or
    layers of a kind differ."""
    kinds = kinds_in(kv_cache_config)
    parts = iter(geometry.caches)
    maps: list[BlockMap] = []
    blocks = min(len(_cache_of(kv_caches, name)) for kind in kinds for name in kind.layers)
    for kind, order in zip(kinds, orders, strict=True):
        caches = {name: _cache_of(kv_caches, name) for name in kind.layers}
        own = [next(parts) for _ in kind.widths]
        _check_caches(caches, shape, own)
        maps += _maps_of(kind, caches, shape, own, order, blocks)
    devices = {str(_cache_of(kv_caches, name).device) for kind in kinds for name in kind.layers}
    if len(devices) != 1:
        raise Unfit(f"the KV caches are on {' and '.join(sorted(devices))}; they must all be on one device")
    return replace(maps[0], further=tuple(maps[1:]))


def _maps_of(
    kind: CacheKind,
    caches: dict[str, Any],
    shape: Shape,
    own: Sequence[KVGeometry],
    order: NDArray[np.int32],
    blocks: int,
) -> list[BlockMap]:
    """The places of one kind of cache: of each of its widths."""
    found: list[BlockMap] = []
    start = 0
    for part in own:
        block_bytes = part.page_bytes // (part.layers * shape.blocks_per_page)
        here = order[start : start + block_bytes]
        on_cpu = next(iter(caches.values())).device.type == "cpu"
        runs = 1 if on_cpu else vllm_order.runs_of(here, shape.block_tokens)
        if not runs:
            raise Unfit(
                f"layer {kind.layers[0]}: the tokens of a block do not lie one behind the other, of all heads or of "
                "each"
            )
        size = block_bytes // runs
        bases = [cache.data_ptr() + start + run * size for cache in caches.values() for run in range(runs)]
        strides = [cache.stride(0) * cache.element_size() for cache in caches.values() for _ in range(runs)]
        places = np.array(bases, dtype=np.int64), np.array(strides, dtype=np.int64)
        found.append(BlockMap(*places, size, blocks, shape.block_tokens, shape.blocks_per_page, here[:size]))
        start += block_bytes
    return found


def _check_caches(caches: dict[str, Any], shape: Shape, own: Sequence[KVGeometry]) -> None:
    """own: the rank's geometry of each of the widths of these layers, which are of one kind."""
    first = next(iter(caches.values()))
    heads = own[0].kv_heads
    elements = sum(part.tensors * part.head_dim for part in own)  # of a token and head
    block_bytes = sum(part.page_bytes for part in own) // (len(caches) * shape.blocks_per_page)
    for name, cache in caches.items():
        if cache.ndim == 4 and cache.shape[2] < shape.block_tokens and shape.block_tokens % cache.shape[2] == 0:
            raise Unfit(
                f"layer {name}: the attention backend splits blocks of {shape.block_tokens} tokens into such of "
                f"{cache.shape[2]}: start vLLM with --block-size {cache.shape[2]}, on both sides"
            )
        if (
            cache.device != first.device
            or cache.shape[1:] != (heads, shape.block_tokens, elements)
            or cache.stride()[1:] != first.stride()[1:]
            or not vllm_order.is_one_run(cache)
            or cache[0].nbytes != block_bytes
        ):
            raise Unfit(
                f"layer {name}: its cache on {cache.device} has shape {tuple(cache.shape)}, strides {cache.stride()}; "
                f"a block must be {block_bytes} bytes one behind the other: {heads} heads, {shape.block_tokens} "
                f"tokens, {elements} elements, in an order and on a device that all layers of its kind have"
            )


def _cache_of(kv_caches: dict[str, Any], layer: str) -> Any:
    if layer not in kv_caches:
        raise Unfit(f"layer {layer} has no KV cache of its own; the connector serves models where each has one")
    cache = kv_caches[layer]
    return cache.unsqueeze(1) if cache.ndim == 3 else cache
