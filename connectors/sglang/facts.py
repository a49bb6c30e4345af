"""An SGLang engine's facts for the daemon: model, weights, KV geometry, digest chain; and where its pages lie."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.client.engine_pools import EnginePools
from kvferry.client.one_rank import OneRank
from kvferry.connectors.blocks import BlockMap
from kvferry.connectors.sglang.digests import ALGORITHM, NO_PARENT
from kvferry.connectors.sglang.settings import VARIABLE, BackendSettings
from kvferry.connectors.weight_files import revision_of_files
from kvferry.proto import common_pb2
from kvferry.proto.limits import MAX_AUX_BYTES
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.transfer.geometry.namespace import NamespaceFacts
from kvferry.transfer.geometry.rank_lanes import rank_geometry

POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
CACHE_DTYPES = ("auto", "bf16", "bfloat16", "float16")
_WRITTEN_BY_WHOEVER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
# Arguments of a server, the value that each must have, and why.
NOT_SERVED: dict[str, tuple[object, str]] = {
    "pp_size": (1, "a page has all layers of its tokens, and with stages no process has all of them"),
    "enable_dp_attention": (False, "its ranks have pages of different requests; use --dp-size with a daemon each"),
    "attn_cp_size": (1, "a page has consecutive tokens, which are dealt out to ranks then"),
    "dcp_size": (1, "a page has consecutive tokens, which are dealt out to ranks then"),
    "nnodes": (1, "all ranks of an engine are beside one daemon"),
    "speculative_algorithm": (None, "what draft models and their hidden states need is not carried over"),
    "enable_lora": (False, "each server gives an adapter a name of its own, so its pages have no common name"),
    "enable_memory_saver": (False, "its memory comes and goes, and the daemon has it mapped"),
    "enable_hisparse": (False, "its pages are not all on the GPU"),
    "disaggregation_decode_enable_offload_kvcache": (False, "the daemon's host tier is in its place"),
}
NOT_SERVED_ON_DECODE: dict[str, tuple[object, str]] = {
    "enable_hierarchical_cache": (False, "the daemon's host tier is in its place: kvferry serve --host-bytes"),
}


class NotServed(RuntimeError):
    """This engine's configuration is none that the backend can serve; the message says what to change."""


def check_server(server_args: Any) -> None:
    """NotServed names an argument that is not served, and why."""
    decode = getattr(server_args, "disaggregation_mode", "") == "decode"
    for name, (wanted, why) in {**NOT_SERVED, **(NOT_SERVED_ON_DECODE if decode else {})}.items():
        value = getattr(server_args, name, wanted)
        if value != wanted and not (wanted is False and value is None):
            raise NotServed(f"{name} is {value!r}; kvferry serves {wanted!r}: {why}")
    if (dtype := server_args.kv_cache_dtype) not in CACHE_DTYPES:
        raise NotServed(
            f"kv_cache_dtype is {dtype!r}; kvferry serves {', '.join(CACHE_DTYPES)}: others have scales that pages "
            "do not name"
        )
    if os.environ.get("SGLANG_DISAGG_STAGING_BUFFER", "0").lower() in ("1", "true"):
        raise NotServed("SGLANG_DISAGG_STAGING_BUFFER is set; kvferry has slots of its own: unset it")


def check_engine(queue: Any, args: Any) -> None:
    """NotServed names what of the engine's KV or metadata is not served."""
    pool, model = queue.token_to_kv_pool, queue.scheduler.model_config
    kind = type(pool).__name__
    if kind not in POOLS:
        raise NotServed(f"the KV cache is a {kind}; kvferry serves {', '.join(POOLS)}: full attention in all layers")
    if queue.draft_token_to_kv_pool is not None:
        raise NotServed("a draft model has KV beside the model's; kvferry does not serve speculative decoding here")
    if args.state_types:
        raise NotServed(
            f"the model has state beside its KV: {', '.join(map(str, args.state_types))}; kvferry serves none"
        )
    if getattr(pool, "post_capture_active", False):
        raise NotServed("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is set; its memory has no name for the daemon: unset it")
    if (layout := getattr(pool, "kv_cache_layout", "nhd")) != "nhd":
        raise NotServed(f"kv_cache_layout is {layout!r}; kvferry serves 'nhd'")
    if pool.store_dtype != pool.dtype:
        raise NotServed(f"the KV cache stores {pool.dtype} as {pool.store_dtype}; kvferry serves plain ones")
    if kind == "MHATokenToKVPool" and pool.head_dim != pool.v_head_dim:
        raise NotServed(f"keys have {pool.head_dim} elements a head, values {pool.v_head_dim}; they must be as many")
    if getattr(model, "is_multimodal", False):
        raise NotServed("the model is multimodal: prefill alone sees its images, and decode cannot name their pages")
    if (device := queue.metadata_buffers.bootstrap_room.device.type) != "cpu":
        raise NotServed(f"the metadata rows are on {device}; kvferry reads them in the machine's memory")
    if (size := sum(args.aux_item_lens)) > MAX_AUX_BYTES:
        raise NotServed(f"a metadata row has {size} bytes; kvferry carries {MAX_AUX_BYTES}")


def geometry_of(pool: Any, model: Any, ranks: int) -> KVGeometry:
    """The whole model's. NotServed where ranks do not share the heads evenly: where there are more of them, each head
    is that of as many ranks as follow each other."""
    latent = type(pool).__name__ == "MLATokenToKVPool"
    heads = 1 if latent else pool.head_num if ranks == 1 else model.get_total_num_kv_heads()
    geometry = KVGeometry(
        layers=pool.layer_num,
        kv_heads=heads,
        head_dim=pool.kv_cache_dim if latent else pool.head_dim,
        dtype=str(pool.dtype).removeprefix("torch."),
        page_size=pool.page_size,
        layout=Layout.ENGINE,
        tensors=1 if latent else 2,
    )
    if not latent and pool.head_num != own_geometry(geometry, ranks).kv_heads:
        raise NotServed(f"a rank has {pool.head_num} KV heads, the model {heads}, and there are {ranks} ranks")
    return geometry


def facts_of(queue: Any, settings: BackendSettings, geometry: KVGeometry) -> NamespaceFacts:
    model = queue.scheduler.model_config
    return NamespaceFacts(
        model=fingerprint(model),
        revision=revision_of(model, queue.scheduler.server_args, settings),
        geometry=geometry,
        digest_algorithm=ALGORITHM,
        root_digest=NO_PARENT,
        engine_layout=f"sglang {type(queue.token_to_kv_pool).__name__} nhd",
    )


def fingerprint(model: Any) -> str:
    config = dict(model.hf_config.to_dict())
    for key in _WRITTEN_BY_WHOEVER:
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    quantization = getattr(model, "quantization", None) or "plain"
    return f"sglang-{config.get('model_type', 'unknown')}-{digest[:32]}-{quantization}-{model.dtype!s}"


def revision_of(model: Any, server_args: Any, settings: BackendSettings) -> str:
    """The name of the weights; NotServed where nothing names them."""
    if settings.revision:
        return settings.revision
    found = None
    if str(server_args.load_format) != "dummy":
        found = revision_of_files(model.model_path, getattr(model, "revision", None), server_args.download_dir)
    if found is None:
        raise NotServed(
            f"nothing names the weights of {model.model_path!r} (load_format {server_args.load_format}), and engines "
            f"with other weights must not share pages: set {VARIABLE}.revision to a name of them, the same on both "
            "sides"
        )
    return found


def block_map(args: Any, geometry: KVGeometry) -> BlockMap:
    """Where SGLang's pages lie; `geometry`: of the rank. A block is one of its pages, in each place one layer's keys
    or values. NotServed where that is not so."""
    bytes_of = geometry.page_bytes // (geometry.layers * geometry.tensors)
    if len(args.kv_data_ptrs) != geometry.layers * geometry.tensors or set(args.kv_item_lens) != {bytes_of}:
        raise NotServed(
            f"the KV cache has {len(args.kv_data_ptrs)} tensors with pages of {sorted(set(args.kv_item_lens))} bytes; "
            f"{geometry.layers * geometry.tensors} with pages of {bytes_of} were expected"
        )
    token = bytes_of // geometry.page_size
    return BlockMap(
        bases=np.array(args.kv_data_ptrs, dtype=np.int64),
        strides=np.full(len(args.kv_data_ptrs), bytes_of, dtype=np.int64),
        block_bytes=bytes_of,
        blocks=min(args.kv_data_lens) // bytes_of,
        block_tokens=geometry.page_size,
        blocks_per_page=1,
        order=np.repeat(np.arange(geometry.page_size, dtype=np.int32), token),
    )


def own_geometry(geometry: KVGeometry, ranks: int) -> KVGeometry:
    """One rank's part of it. NotServed where ranks cannot share the heads."""
    try:
        return rank_geometry(geometry, ranks)
    except ValueError as error:
        raise NotServed(str(error)) from error


def registration(blocks: BlockMap, geometry: KVGeometry, device: int) -> Callable[[], EnginePools]:
    """Registers the engine's pages with a daemon, each time that it is called. NotServed where they cannot be."""
    from kvferry.connectors.gpu_blocks import registered

    def register() -> EnginePools:
        try:
            return registered(blocks, geometry, device)
        except (OSError, ValueError) as error:
            raise NotServed(f"the KV cache cannot be shared with the daemon: {error}") from error

    register()  # it is refused at the start, or never
    return register


def rank_of(manager: Any, role: common_pb2.Role) -> OneRank | None:
    """The rank of this process, where the engine has several: all are children of one process, and it has one port."""
    if manager.attn_tp_size == 1:
        return None
    engine = hashlib.sha256(f"{os.getppid()} {manager.server_args.port} {manager.system_dp_rank}".encode()).hexdigest()
    return OneRank(manager.attn_tp_rank, manager.attn_tp_size, engine[:16], role)
