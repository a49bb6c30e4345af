"""In which order vLLM's attention kernels keep the tokens of a block: they differ by instruction set, and none says so.
It is found out by writing to a block as the engine does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def instructions(vllm_config: Any, spec: Any) -> str:
    """Of the kernels that this engine uses."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(
        _get_attn_isa(
            vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
        )
    )


def engine_order(vllm_config: Any, spec: Any) -> NDArray[np.int32]:
    """(block bytes,): the token of the block that each byte belongs to. ValueError where none or several do."""
    import torch
    from vllm import _custom_ops as ops

    tokens, heads, head_size = spec.block_size, spec.num_kv_heads, spec.head_size
    isa = instructions(vllm_config, spec)
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
