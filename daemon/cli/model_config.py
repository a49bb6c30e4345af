"""The KV of a model, by its config.json as `transformers` writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvferry.transfer.geometry.kv_geometry import ITEMSIZES, CacheShape, KVGeometry

Fields: TypeAlias = Mapping[str, object]  # of JSON

MAX_FILE_BYTES = 16 << 20
INNER = ("text_config", "llm_config", "language_config", "thinker_config")  # of models that see or hear
FULL = frozenset({"full_attention", "attention", "global"})  # kinds of layers that keep every token
DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "auto": ""}
STATES = ("ssm_cfg", "mamba_d_state", "mamba_d_ssm", "ssm_state_size")  # of layers that keep a state
INDEX_QUANTUM, INDEX_SCALE = 128, 4  # bytes of an indexer's key that have one scale, and of that
PACKED_LATENT = 656  # bytes: engines keep quantized latents beside an indexer with scales of their own


class ModelConfigError(ValueError):
    """A config.json that cannot be read, or whose KV kvferry does not keep; names the field."""


@dataclass(frozen=True, slots=True)
class ModelKV:
    """What each token of a model leaves in the KV cache: `tensors` rows a layer of `kv_heads` x `head_dim` values."""

    name: str  # of its architecture
    layers: int
    kv_heads: int
    head_dim: int
    tensors: int  # 2: K and V; 1: a latent that is both (MLA)
    dtype: str  # torch's name
    index_dim: int = 0  # values of a key of a sparse attention's indexer, in each layer; 0: there is none

    def geometry(self, page_size: int, dtype: str) -> KVGeometry:
        """The shape of a page; `dtype`: torch's name or vLLM's, empty: the model's. ValueError names the field."""
        chosen, width = DTYPES.get(dtype, dtype) or self.dtype, self.head_dim
        if self.index_dim and chosen.startswith("float8"):
            chosen, width = "uint8", PACKED_LATENT
        scales = self.index_dim // INDEX_QUANTUM * INDEX_SCALE
        further = tuple(CacheShape(self.layers, 1, own, "uint8", 1) for own in (self.index_dim, scales) if own)
        return KVGeometry(self.layers, self.kv_heads, width, chosen, page_size, tensors=self.tensors, further=further)


def read_model(path: str) -> ModelKV:
    """The model of a config.json, or of a folder with one. ModelConfigError."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        with open(file, "rb") as opened:
            text = opened.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ModelConfigError(f"{file} has more than {MAX_FILE_BYTES} bytes; a config.json has some thousands")
        fields = json.loads(text)
    except OSError as error:
        raise ModelConfigError(f"{file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelConfigError):
            raise
        raise ModelConfigError(f"{file} is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ModelConfigError(f"{file} is no JSON object")
    try:
        return model_kv(fields)
    except ModelConfigError as error:
        raise ModelConfigError(f"{file}: {error}") from None


def model_kv(fields: Fields) -> ModelKV:
    """The KV of a model with these fields. ModelConfigError names what is missing, or is not kept."""
    outer = fields
    for name in INNER:
        inner = fields.get(name)
        if isinstance(inner, dict) and "num_hidden_layers" in (inner.get("text_config") or inner):
            fields = inner.get("text_config") or inner
            break
    layers = _number(fields, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    _refuse_other_layers(fields)
    dtype = _dtype(fields, outer)
    name = _name(outer)
    if "kv_lora_rank" in fields and fields["kv_lora_rank"] is not None:
        width = _number(fields, "kv_lora_rank") + _number(fields, "qk_rope_head_dim")
        return ModelKV(name, layers, 1, width, 1, dtype, _index_dim(fields))
    heads = _number(fields, "num_attention_heads", "n_head", "n_heads")
    if fields.get("multi_query") is True and not fields.get("new_decoder_architecture"):
        kv_heads = 1
    else:
        kv_heads = _number(fields, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)
    if fields.get("head_dim") is not None:
        return ModelKV(name, layers, kv_heads, _number(fields, "head_dim"), 2, dtype)
    hidden = _number(fields, "hidden_size", "n_embd", "d_model")
    if hidden % heads:
        raise ModelConfigError(f"hidden_size is {hidden}; without head_dim it must be a multiple of {heads} heads")
    return ModelKV(name, layers, kv_heads, hidden // heads, 2, dtype)


def _index_dim(fields: Fields) -> int:
    """The values of a key of the model's indexer; 0: it has none. ModelConfigError."""
    if fields.get("index_topk") is None and fields.get("index_head_dim") is None:
        return 0
    if (pooled := fields.get("index_kpool")) not in (None, 1):
        raise ModelConfigError(
            f"index_kpool is {str(pooled)[:64]}: its indexer has one key for several tokens, and kvferry keeps caches "
            "that have each token"
        )
    width = _number(fields, "index_head_dim")
    if width % INDEX_QUANTUM:
        raise ModelConfigError(f"index_head_dim is {width}; it must be a multiple of {INDEX_QUANTUM}")
    return width


def _number(fields: Fields, *names: str, default: int = 0) -> int:
    """The first of these fields that is there, or the default if it is not 0."""
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 24:
            raise ModelConfigError(
                f"{name} is {str(value)[:64]!r}; it must be a whole number from 1 to {(1 << 24) - 1}"
            )
        return value
    if default:
        return default
    raise ModelConfigError(f"has none of {', '.join(names)}")


def _name(fields: Fields) -> str:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else fields.get("model_type")
    return name[:64] if isinstance(name, str) else "model"


def _dtype(fields: Fields, outer: Fields) -> str:
    """The dtype of its weights, in which engines keep the KV unless told otherwise."""
    for found in (fields, outer):
        for name in ("dtype", "torch_dtype"):
            if (value := found.get(name)) is not None:
                text = str(value).removeprefix("torch.")
                if text not in ITEMSIZES:
                    raise ModelConfigError(f"{name} is {text[:64]!r}; it must be one of {', '.join(ITEMSIZES)}")
                return text
    return "bfloat16"


def _refuse_other_layers(fields: Fields) -> None:
    """ModelConfigError where some layers keep only a window, or a state: kvferry's pages are of full attention."""
    kinds = fields.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    others = [str(kind) for kind in kinds if kind not in FULL]
    state = next((name for name in STATES if fields.get(name)), "")
    if others:
        what = f"layer_types has {len(others)} of {len(kinds)} layers of {', '.join(sorted(set(others)))[:128]}"
    elif fields.get("sliding_window") and fields.get("use_sliding_window", True):
        what = f"sliding_window is {str(fields['sliding_window'])[:64]}"
    elif state:
        what = f"{state} is {str(fields[state])[:64]}"
    else:
        return
    raise ModelConfigError(f"{what}: kvferry keeps the KV of full attention alone, and its connectors refuse the model")
