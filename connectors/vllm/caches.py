"""The kinds of KV caches that the connector serves, as vLLM describes them: one group of layers with full attention,
each with keys and values by heads, with one latent a token (MLA), or with the keys of a sparse attention's indexer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.transfer.geometry.kv_geometry import CacheShape

CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
PACKED_LATENTS = "fp8_ds_mla"  # a token's latent with its own scales, one behind the other
PACKED_LATENT_BYTES = 656
KINDS = ("FullAttentionSpec", "MLAAttentionSpec")
SEVERAL = "UniformTypeKVCacheSpecs"  # under one block table
INDEX_KEYS, INDEX_SCALES = 128, 4  # bytes of a quantized run of an indexer's key, and of its scale
_PACKED = ("num_head_slots", "state_content_bytes", "alignment", "page_size_padded", "model_version")
_COMPRESSED = ("compress_ratio", "tokens_per_state")
DRAFTS = ("eagle", "eagle3", "mtp", "draft_model")  # methods whose draft model has KV
DRAFT_FILES = ("load_format", "download_dir", "ignore_patterns", "model_loader_extra_config")
"""What of a load configuration decides which files are read."""
_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")  # they propose from tokens or hidden states


class Unfit(RuntimeError):
    """This engine's configuration is none that the connector can serve; the message says what to change."""


@dataclass(frozen=True)
class CacheKind:
    """The layers of one group whose caches are alike."""

    spec: Any
    layers: tuple[str, ...]

    @property
    def tensors(self) -> int:
        """K and V, or one."""
        return 1 if is_latent(self.spec) else 2

    @property
    def dtype(self) -> str:
        """The name of an element's type: bytes, of latents that are packed."""
        return "uint8" if _is_packed_latent(self.spec) else str(self.spec.dtype).removeprefix("torch.")

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements that a token and head has in each tensor; several, where a block has those of all its tokens one
        behind the other, then what is next: an indexer's keys, then their scales."""
        spec = self.spec
        if _is_packed_latent(spec):
            return (PACKED_LATENT_BYTES,)
        if self.is_index_with_scales:
            parts = spec.head_size // (INDEX_KEYS + INDEX_SCALES)
            return (parts * INDEX_KEYS, parts * INDEX_SCALES)
        return (spec.head_size,)

    @property
    def is_index_with_scales(self) -> bool:
        """Whether it has an indexer's keys in bytes, which no cache dtype of the engine says."""
        bytes_alone = is_latent(self.spec) and self.dtype == "uint8" and _dtype_name(self.spec) is None
        return bytes_alone and self.spec.head_size % (INDEX_KEYS + INDEX_SCALES) == 0

    def shapes(self, heads: int) -> list[CacheShape]:
        """The caches of the daemon's pages that it is, with so many heads."""
        return [CacheShape(len(self.layers), heads, width, self.dtype, self.tensors) for width in self.widths]


def kinds_of(vllm_config: Any, kv_cache_config: Any) -> tuple[CacheKind, ...]:
    """The kinds of the one KV cache group, in one order in all engines of a model. Unfit names what does not fit and
    what to do."""
    kinds = kinds_in(kv_cache_config)
    _check_dtype(vllm_config.cache_config, any(_is_packed_latent(kind.spec) for kind in kinds))
    for kind in kinds:
        _check_kind(kind)
    return kinds


def kinds_in(kv_cache_config: Any) -> tuple[CacheKind, ...]:
    """The kinds, unjudged but for what they are and their blocks. Unfit."""
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in _specs(group).values()]
    names = sorted({type(spec).__name__ for spec in specs})
    if len(groups) != 1 or not set(names) <= set(KINDS):
        raise Unfit(
            f"the model has {len(groups)} KV cache groups ({', '.join(names)}); the connector serves models "
            "whose layers all have full attention (with other kinds a page is no prefix's alone), in blocks of one "
            "table"
        )
    if len(sizes := sorted({spec.block_size for spec in specs})) != 1:
        raise Unfit(f"block_size of the KV cache is {' and '.join(map(str, sizes))}; blocks of one table have one size")
    layers: dict[tuple[object, ...], list[str]] = {}
    by_name = _specs(groups[0])
    for name, spec in by_name.items():
        layers.setdefault(_likeness(spec), []).append(name)
    kinds = (CacheKind(by_name[names[0]], tuple(names)) for names in layers.values())
    return tuple(sorted(kinds, key=lambda kind: (kind.tensors == 1, -kind.spec.head_size, kind.dtype)))


def _specs(group: Any) -> dict[str, Any]:
    """The spec of each of the group's layers."""
    spec = group.kv_cache_spec
    several = type(spec).__name__ == SEVERAL
    return {name: spec.kv_cache_specs[name] if several else spec for name in group.layer_names}


def _likeness(spec: Any) -> tuple[object, ...]:
    dtypes = str(spec.dtype), _dtype_name(spec)
    told = tuple(getattr(spec, name, None) for name in (*_PACKED, *_COMPRESSED, "non_causal"))
    return (type(spec).__name__, spec.num_kv_heads, spec.head_size, getattr(spec, "head_size_v", None), *dtypes, *told)


def _dtype_name(spec: Any) -> str | None:
    """The engine's cache dtype by which a layer keeps its latents; None: it has one of its own."""
    name: str | None = getattr(spec, "cache_dtype_str", None)
    return name


def _is_packed_latent(spec: Any) -> bool:
    return is_latent(spec) and _dtype_name(spec) == PACKED_LATENTS


def _check_kind(kind: CacheKind) -> None:
    spec, first = kind.spec, kind.layers[0]
    for name in _PACKED:
        value = getattr(spec, name, None)
        known = name == "state_content_bytes" and value == PACKED_LATENT_BYTES and _is_packed_latent(spec)
        if value is not None and not known:
            raise Unfit(
                f"{name} of the KV cache is {value}: this attention backend packs keys and values in a way of its own; "
                "choose another by --attention-backend, on both sides"
            )
    for name in _COMPRESSED:
        if (ratio := getattr(spec, name, 1)) != 1:
            raise Unfit(
                f"{name} of the KV cache is {ratio} in layer {first}; the connector serves caches that have each token"
            )
    if getattr(spec, "non_causal", False):
        raise Unfit(
            f"layer {first} is non_causal: a token's keys and values are also of the prompt's later ones (prefix LM); "
            "the connector serves causal attention, in which a page is of the tokens before it alone"
        )
    if not is_latent(spec) and spec.head_size != spec.head_size_v:
        raise Unfit(
            f"keys have {spec.head_size} elements a head, values {spec.head_size_v}; pages hold equal ones only"
        )


def _check_dtype(cache: Any, packed_latents: bool) -> None:
    served = (*CACHE_DTYPES, PACKED_LATENTS) if packed_latents else CACHE_DTYPES
    if cache.cache_dtype not in served:
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
    """Whether a token has one vector in each layer, on every rank (MLA, an indexer), in the place of keys and values by
    heads."""
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
    _check_draft(vllm_config, found)
    return found


def _check_draft(vllm_config: Any, draft: Any) -> None:
    """Unfit names what of the draft model's settings no page's name says."""
    has_several = getattr(draft, "use_multi_module_mtp", None)  # vLLM 0.26 has none, and runs one module alone
    if has_several is not None and has_several():
        raise Unfit(
            f"speculative_config has several MTP modules, and num_speculative_tokens {draft.num_speculative_tokens}: "
            "each module's KV of a token needs one token more behind it, and a page's name has one; set "
            "num_speculative_tokens to 1, on both sides"
        )
    if getattr(draft, "disable_eagle_block_drop", False):
        raise Unfit(
            "speculative_config.disable_eagle_block_drop is on: vLLM's prefix cache has blocks then whose last token's "
            "KV in the draft model is of another prompt's next token; leave it out, on both sides"
        )
    own, dtype = vllm_config.cache_config.cache_dtype, getattr(draft, "kv_cache_dtype", None)
    if dtype not in (None, own):
        raise Unfit(
            f"speculative_config.kv_cache_dtype is {dtype!r}, --kv-cache-dtype {own!r}; the connector serves layers "
            "of one dtype: leave the first out, on both sides"
        )
    if (loading := getattr(draft, "draft_load_config", None)) is not None:
        _check_loading(loading, vllm_config.load_config)


def _check_loading(drafts: Any, models: Any) -> None:
    """Unfit: in vLLM 0.26 Model Runner V1 loads EAGLE's heads by `drafts`, V2 by `models`, and the files that name the
    draft model are those that are loaded."""
    for name in DRAFT_FILES:
        own, needed = getattr(drafts, name, None), getattr(models, name, None)
        if own != needed:
            raise Unfit(
                f"speculative_config.draft_load_config.{name} is {own!r}; it must be the model's, {needed!r}: not all "
                "versions of vLLM load the draft model by it; leave draft_load_config out, on both sides"
            )


def looks_ahead(vllm_config: Any) -> bool:
    """Whether the draft model's KV of a token is also of the token behind it, as EAGLE's and MTP's is: then a page is
    of a prefix only together with the token that follows it."""
    found = draft_of(vllm_config)
    return found is not None and found.method != "draft_model"
