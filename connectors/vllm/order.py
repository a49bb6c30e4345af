"""The order in which vLLM's attention kernels keep the tokens of a block. On GPUs the strides of its KV caches say so.
The kernels for CPUs differ by instruction set, and none says so: it is found out by writing to a block as the engine
does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.connectors.vllm.caches import CacheKind, is_latent
from kvferry.transfer.geometry.namespace import MAX_TEXT


def name_of(vllm_config: Any, kinds: Sequence[CacheKind]) -> str:
    """The name of a block's order: engines whose names are equal keep equal bytes of a block in an equal order."""
    names = [_name_of(vllm_config, kind.spec) for kind in kinds]
    return " + ".join(dict.fromkeys(names))[:MAX_TEXT]


def _name_of(vllm_config: Any, spec: Any) -> str:
    cache = vllm_config.cache_config
    kind = "" if cache.cache_dtype == "auto" else f" {cache.cache_dtype}"  # else the model's, which is named elsewhere
    if vllm_config.device_config.device_type == "cpu":
        order = "MLA" if is_latent(spec) else f"LBHNC {_instructions(vllm_config, spec)}"
        return f"vllm cpu {order}{kind}, blocks of {spec.block_size}"
    return f"vllm cuda {'MLA' if is_latent(spec) else _layout(vllm_config)}{kind}"


def _layout(vllm_config: Any) -> str:
    """The order within a block: HNC (heads, tokens, elements) or NHC."""
    cache_config = vllm_config.cache_config
    if not hasattr(cache_config, "get_resolved_kv_cache_layout"):  # vLLM 0.26
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        # Of several ranks the scheduler's process has no worker that asked for the layout before.
        with set_current_vllm_config(vllm_config):
            return {"HND": "HNC", "NHD": "NHC"}[get_kv_cache_layout()]
    name: str = cache_config.get_resolved_kv_cache_layout().name
    return name.replace("L", "").replace("B", "")  # whether layers or blocks are outermost is nothing to a page


def is_one_run(cache: Any) -> bool:
    """Whether a block of `cache`, a layer's tensor (blocks, heads, tokens, elements), has its bytes one behind the
    other, on a CPU in that very order."""
    if cache.device.type == "cpu":
        return bool(cache[0].is_contiguous())
    return bool(cache[0].permute(_outer_first(cache)).is_contiguous())


def strided_order(cache: Any) -> NDArray[np.int32]:
    """(block bytes,): the token of the block that each byte belongs to, of a layer's tensor (blocks, heads, tokens,
    elements). ValueError where it has another shape."""
    if cache.ndim != 4:
        raise ValueError(f"a KV cache of shape {tuple(cache.shape)} is not (blocks, heads, tokens, elements)")
    _, heads, tokens, elements = cache.shape
    numbers = np.broadcast_to(np.arange(tokens, dtype=np.int32)[:, None], (heads, tokens, elements))
    order: NDArray[np.int32] = numbers.transpose(_outer_first(cache)).reshape(-1)
    return order.repeat(int(cache.element_size()))


def runs_of(order: NDArray[np.int32], tokens: int) -> int:
    """The number of equal runs of bytes that a block is, each with all of its `tokens` one behind the other: pages that
    are made run by run have the same bytes whatever the size of a block. 0: it is none such."""
    if tokens < 2:  # one says nothing of its neighbours
        return 0
    starts = int(np.count_nonzero(np.diff(order, prepend=np.int32(-1)) * (order == 0)))
    if starts == 0 or len(order) % (starts * tokens):
        return 0
    run = np.arange(tokens, dtype=np.int32).repeat(len(order) // (starts * tokens))
    return starts if (order.reshape(starts, -1) == run).all() else 0


def _outer_first(cache: Any) -> list[int]:
    """The dimensions within a block, from the largest stride to the smallest."""
    return sorted(range(3), key=lambda i: -int(cache.stride(i + 1)))


def _instructions(vllm_config: Any, spec: Any) -> str:
    """The instruction set of the kernels that a CPU engine uses."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(
        _get_attn_isa(
            vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
        )
    )


def cpu_order(vllm_config: Any, spec: Any) -> NDArray[np.int32]:
    """(block bytes,): the token of the block that each byte belongs to. ValueError where none or several do."""
    import torch
    from vllm import _custom_ops as ops

    tokens, heads, head_size = spec.block_size, spec.num_kv_heads, spec.head_size
    isa = _instructions(vllm_config, spec)
    slots = torch.arange(tokens, dtype=torch.int64)

    def write(marks: NDArray[np.bool_]) -> NDArray[np.bool_]:
        block = torch.zeros(1, heads, tokens, 2 * head_size, dtype=spec.dtype)
        keys, values = block.view(1, heads, 2 * tokens, head_size).chunk(2, dim=2)
        kv = torch.from_numpy(marks).to(vllm_config.model_config.dtype)[:, None, None].repeat(1, heads, head_size)
        ops.cpu_attn_reshape_and_cache(
            kv, kv, keys, values, slots, isa, kv_cache_dtype=vllm_config.cache_config.cache_dtype
        )
        written: NDArray[np.bool_] = (block != 0).reshape(-1).numpy()
        return written

    return order_of(write, tokens).repeat(spec.dtype.itemsize)


def order_of(write: Callable[[NDArray[np.bool_]], NDArray[np.bool_]], tokens: int) -> NDArray[np.int32]:
    """(elements,): the token that each element of a block belongs to. `write` takes a mark for each of `tokens` tokens,
    and returns which elements of a block have one. ValueError where an element is no token's, or tokens have not
    equally many."""
    numbers = np.arange(tokens)
    whole = write(numbers >= 0)
    if not whole.all():
        raise ValueError(f"a block of {tokens} tokens has elements that belong to none of them")
    order = np.zeros(len(whole), dtype=np.int32)
    for bit in range((tokens - 1).bit_length()):
        order |= write(numbers >> bit & 1 == 1).astype(np.int32) << bit
    counts = np.bincount(order, minlength=tokens)
    if len(counts) != tokens or counts.min() != counts.max():
        raise ValueError(f"the {tokens} tokens of a block have {counts.min()} to {counts.max()} elements")
    return order
