"""A vLLM engine's facts for the daemon: model, weights, KV geometry, digest chain; and where its blocks lie."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.client.engine_pools import EnginePools
from kvferry.client.one_rank import OneRank
from kvferry.connectors.blocks import BlockMap
from kvferry.connectors.movers import HostMover, Mover
from kvferry.connectors.prompt_chain import Unnamed
from kvferry.connectors.scheduler_side import Shape
from kvferry.connectors.settings import Settings
from kvferry.connectors.vllm import order as vllm_order
from kvferry.proto import common_pb2
from kvferry.proto.limits import MAX_NAME_CHARS
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
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
ADAPTER_FILES = (*WEIGHT_FILES, "*.json")
SAMPLES, SAMPLE_BYTES = 64, 64 * 1024
_COMMIT = re.compile("[0-9a-f]{40}")
_log = logging.getLogger(__name__)
_WRITTEN_BY_WHOEVER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


class Unfit(RuntimeError):
    """This engine's configuration is none that the connector can serve; the message says what to change."""


def check_config(vllm_config: Any, kv_cache_config: Any) -> Any:
    """The spec of the one KV cache group. Unfit names what does not fit and what to do."""
    parallel = vllm_config.parallel_config
    for name, needed in NOT_SERVED.items():
        if getattr(parallel, name, 1) != 1:
            raise Unfit(f"{name} is {getattr(parallel, name)}; {needed}: set it to 1, and use tensor_parallel_size")
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or kinds != ["FullAttentionSpec"]:
        raise Unfit(
            f"the model has {len(groups)} KV cache groups ({', '.join(kinds)}); the connector serves models "
            "whose layers all have full attention (with other kinds a page is no prefix's alone)"
        )
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
    spec = groups[0].kv_cache_spec
    for name in ("num_head_slots", "state_content_bytes"):
        if (value := getattr(spec, name, None)) is not None:
            raise Unfit(
                f"{name} of the KV cache is {value}: this attention backend packs keys and values in a way of its own; "
                "choose another by --attention-backend, on both sides"
            )
    if spec.head_size != spec.head_size_v:
        raise Unfit(
            f"keys have {spec.head_size} elements a head, values {spec.head_size_v}; pages hold equal ones only"
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
        ),
        digest_algorithm="sha256_cbor",
        root_digest=root_digest(),
        engine_layout=vllm_order.name_of(vllm_config, spec),
    )


def kv_heads_of(vllm_config: Any, spec: Any) -> int:
    """KV heads of the model, over all ranks. Unfit where a rank's are not its share of them."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    own: int = spec.num_kv_heads
    if ranks == 1:
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


def fingerprint(model_config: Any) -> str:
    config = dict(model_config.hf_config.to_dict())
    for key in _WRITTEN_BY_WHOEVER:
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    quantization = getattr(model_config, "quantization", None) or "plain"
    return f"vllm-{config.get('model_type', 'unknown')}-{digest[:32]}-{quantization}-{model_config.dtype!s}"


def revision_of(vllm_config: Any, settings: Settings) -> str:
    """The name of the weights; Unfit where nothing names them."""
    if settings.revision:
        return settings.revision
    if str(getattr(vllm_config.load_config, "load_format", "")) == "dummy":
        raise Unfit(
            "load_format is dummy, so the model's files do not name the weights: set "
            "kv_connector_extra_config.revision to a name of them that no others have had, the same on both sides"
        )
    model = vllm_config.model_config
    cache = getattr(vllm_config.load_config, "download_dir", None)
    return weights_revision(model.model, getattr(model, "revision", None), cache)


def weights_name(settings: Settings) -> str:
    """The name that the file of the settings has now; empty where there is none, or none that is fit."""
    if not (path := settings.weights_file):
        return ""
    try:
        if not Path(path).is_file():  # a pipe would be waited for
            raise OSError("it is no file")
        with Path(path).open() as file:
            name = file.read(4 * MAX_NAME_CHARS).strip()
    except (OSError, ValueError) as error:
        _log.warning("weights_file %s cannot be read: %s", path, error)
        return ""
    if len(name) > MAX_NAME_CHARS:
        _log.warning("weights_file %s has %d characters or more; the bound is %d", path, len(name), MAX_NAME_CHARS)
        return ""
    return name


def adapter_files(path: str) -> list[Path]:
    """The files of a LoRA adapter: weights, and the configuration that scales them. Unnamed where there are none."""
    folder = Path(path).expanduser()
    found = folder if folder.is_dir() else _downloaded(path, None, None)
    files = [] if found is None else sorted(file for name in ADAPTER_FILES for file in found.glob(name))
    if not files:
        raise Unnamed(f"no files of its adapter, {path!r}, were found on this host")
    return files


def weights_revision(model: str, revision: str | None = None, cache: str | None = None) -> str:
    """Hash over the weight files' names, sizes and samples of their contents. `model`: a folder, a file, or a name at
    Hugging Face, whose `revision` is looked for in the folder `cache` of what was downloaded; where its weights are not
    there, a full commit hash names them as well. Unfit says what to do where nothing does."""
    path = Path(model)
    if path.is_file():
        return hash_of([path])
    folder = path if path.is_dir() else _downloaded(model, revision, cache)
    if folder is not None:
        for pattern in WEIGHT_FILES:
            if files := sorted(folder.glob(pattern)):
                return hash_of(files)
    if folder is not path and revision is not None and _COMMIT.fullmatch(revision):
        return hashlib.sha256(f"{model}@{revision}".encode()).hexdigest()
    raise Unfit(
        f"no weight files of model {model!r} were found on this host, and engines with other weights must not share "
        "pages: set kv_connector_extra_config.revision to a name of the weights, the same on both sides"
        + ("" if folder is path else ", or start vLLM with a full commit hash as --revision")
    )


def _downloaded(model: str, revision: str | None, cache: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    try:  # as vLLM looks for it: nothing is fetched, and other files than the engine needs may lack
        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True, ignore_patterns="*")
        )
    except (OSError, ValueError):  # not there; no name of that kind
        return None


def hash_of(files: list[Path]) -> str:
    """Over their names, sizes and samples of their contents."""
    total = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        total.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(size * sample // SAMPLES)
                total.update(file.read(SAMPLE_BYTES))
    return total.hexdigest()


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
    first = _cache_of(kv_caches, names[0])
    blocks = min(len(_cache_of(kv_caches, name)) for name in names)
    runs = 1 if first.device.type == "cpu" else vllm_order.runs_of(order, shape.block_tokens)
    if not runs:
        raise Unfit(f"layer {names[0]}: the tokens of a block do not lie one behind the other, of all heads or of each")
    for name in names:
        cache = kv_caches[name]
        if cache.ndim == 4 and cache.shape[2] < shape.block_tokens and shape.block_tokens % cache.shape[2] == 0:
            raise Unfit(
                f"layer {name}: the attention backend splits blocks of {shape.block_tokens} tokens into such of "
                f"{cache.shape[2]}: start vLLM with --block-size {cache.shape[2]}, on both sides"
            )
        if (
            cache.device != first.device
            or cache.shape[1:] != (geometry.kv_heads, shape.block_tokens, 2 * geometry.head_dim)
            or cache.stride()[1:] != first.stride()[1:]
            or not vllm_order.is_one_run(cache)
            or cache[0].nbytes != block_bytes
        ):
            raise Unfit(
                f"layer {name}: its cache on {cache.device} has shape {tuple(cache.shape)}, strides {cache.stride()}; "
                f"a block must be {block_bytes} bytes one behind the other: {geometry.kv_heads} heads, "
                f"{shape.block_tokens} tokens, {2 * geometry.head_dim} elements, in an order and on a device that all "
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
    return kv_caches[layer]
