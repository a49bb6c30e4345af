"""The kinds of KV caches that the connector serves, as vLLM describes them: one group of layers with full attention,
each with keys and values by heads, or with one latent a token (MLA)."""

from __future__ import annotations

from typing import Any

CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
KINDS = ("FullAttentionSpec", "MLAAttentionSpec")
_PACKED = ("num_head_slots", "state_content_bytes", "alignment", "page_size_padded", "model_version")
DRAFTS = ("eagle", "eagle3", "mtp", "draft_model")  # methods whose draft model has KV
_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")  # they propose from tokens or hidden states


class Unfit(RuntimeError):
    """This engine's configuration is none that the connector can serve; the message says what to change."""


def spec_of(vllm_config: Any, kv_cache_config: Any) -> Any:
    """The spec of the one KV cache group. Unfit names what does not fit and what to do."""
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or kinds[0] not in KINDS:
        raise Unfit(
            f"the model has {len(groups)} KV cache groups ({', '.join(kinds)}); the connector serves models "
            "whose layers all have full attention (with other kinds a page is no prefix's alone), of equal sizes"
        )
    spec = groups[0].kv_cache_spec
    _check_dtype(vllm_config.cache_config)
    for name in _PACKED:
        if (value := getattr(spec, name, None)) is not None:
            raise Unfit(
                f"{name} of the KV cache is {value}: this attention backend packs keys and values in a way of its own; "
                "choose another by --attention-backend, on both sides"
            )
    if (ratio := getattr(spec, "compress_ratio", 1)) != 1:
        raise Unfit(f"compress_ratio of the KV cache is {ratio}; the connector serves caches that have each token")
    if not is_latent(spec) and spec.head_size != spec.head_size_v:
        raise Unfit(
            f"keys have {spec.head_size} elements a head, values {spec.head_size_v}; pages hold equal ones only"
        )
    return spec


def _check_dtype(cache: Any) -> None:
    if cache.cache_dtype not in CACHE_DTYPES:
        raise Unfit(
            f"kv_cache_dtype is {cache.cache_dtype!r}, which packs elements, or keeps scales between them; the "
            f"connector serves {', '.join(CACHE_DTYPES)}: set --kv-cache-dtype to one of them, on both sides"
        )
    if skipped := getattr(cache, "kv_cache_dtype_skip_layers", None):
        raise Unfit(f"kv_cache_dtype_skip_layers is {skipped}; the connector serves layers of one dtype: leave it out")
    if getattr(cache, "calculate_kv_scales", False):
        raise Unfit(
            "calculate_kv_scales is on: each engine would have scales of its own, by its first prompt; start vLLM "
            "without --calculate-kv-scales, and have the scales in the checkpoint"
        )


def is_latent(spec: Any) -> bool:
    """Whether a token has one latent in each layer, on every rank (MLA), in the place of keys and values by heads."""
    return type(spec).__name__ == "MLAAttentionSpec"


def is_quantized(cache: Any) -> bool:
    return str(cache.cache_dtype).startswith("fp8")


def draft_of(vllm_config: Any) -> Any:
    """The speculative configuration whose draft model has KV, in the same blocks; None: there is none.
    Unfit where it is not known on what that KV depends."""
    found = getattr(vllm_config, "speculative_config", None)
    if found is None or found.method in _WITHOUT_KV:
        return None
    if found.method not in DRAFTS:
        raise Unfit(
            f"speculative_config.method is {found.method!r}; the connector serves {', '.join((*DRAFTS, *_WITHOUT_KV))}"
        )
    return found


def looks_ahead(vllm_config: Any) -> bool:
    """Whether the draft model's KV of a token is also of the token behind it, as EAGLE's and MTP's is: then a page is
    of a prefix only together with the token that follows it."""
    found = draft_of(vllm_config)
    return found is not None and found.method != "draft_model"
