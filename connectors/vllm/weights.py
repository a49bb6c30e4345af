"""What names a vLLM engine's model, its weights and the scales of its KV cache, by the files on this host."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvferry.connectors.prompt_chain import AHEAD_NAMES, Unnamed
from kvferry.connectors.settings import Settings
from kvferry.connectors.vllm.caches import Unfit, draft_of, is_quantized, looks_ahead
from kvferry.connectors.weight_files import WEIGHT_FILES, downloaded, revision_of_files
from kvferry.proto.limits import MAX_NAME_CHARS
from kvferry.transfer.geometry.namespace import MAX_TEXT

ADAPTER_FILES = (*WEIGHT_FILES, "*.json")
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as its library has it
# As vLLM finds them; the last as Mistral's own format has them.
_KV_SCALE = re.compile(
    r"[._](k|v|kv)(_scale|_zero_point|_cache\.scale|_proj\.output_scale|_fake_quantizer\.qscale_act)$"
)
_LONGROPE = ("longrope", "su")
_WRITTEN_BY_WHOEVER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
_SET_FOR_AN_ENGINE = ("max_model_len",)  # MiniMax M2 writes it down; it may be another on the pair's other side
_log = logging.getLogger(__name__)


def fingerprint(model_config: Any) -> str:
    config = dict(model_config.hf_config.to_dict())
    for key in (*_WRITTEN_BY_WHOEVER, *_SET_FOR_AN_ENGINE):
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    quantization = getattr(model_config, "quantization", None) or "plain"
    rope = "".join(f"-{_factors(model_config, bound)}" for bound in sorted(set(_longrope_bounds(config))))
    return f"vllm-{config.get('model_type', 'unknown')}-{digest[:32]}-{quantization}-{model_config.dtype!s}{rope}"


def _factors(model_config: Any, bound: int) -> str:
    """Those with which vLLM turns all keys of a model with LongRoPE, whatever the prompt's length."""
    return "long" if model_config.max_model_len > bound else "short"


def _longrope_bounds(config: Mapping[str, object], bound: object = None) -> Iterator[int]:
    """The length behind which long factors are taken, of each place in the configuration that has such."""
    bound = config.get("original_max_position_embeddings", bound)
    if "long_factor" in config or config.get("rope_type", config.get("type")) in _LONGROPE:
        yield bound if isinstance(bound, int) else 0
    for inner in config.values():
        if isinstance(inner, dict):
            yield from _longrope_bounds(inner, bound)


def revision_of(vllm_config: Any, settings: Settings) -> str:
    """The name of the weights; Unfit where nothing names them."""
    return _weights_of(vllm_config.model_config, vllm_config.load_config, settings)


def draft_name(vllm_config: Any, settings: Settings) -> str:
    """The name of the draft model whose KV lies in the engine's blocks, by its method, configuration, weights, the
    length that is set for it and, where it looks ahead, how pages are named then; empty where there is none. How many
    tokens it proposes is nothing to its KV. Unfit where nothing names its weights."""
    if (draft := draft_of(vllm_config)) is None:
        return ""
    model = draft.draft_model_config
    named = _weights_of(model, vllm_config.load_config, settings)
    length = "" if (most := getattr(draft, "max_model_len", None)) is None else f" to {most}"
    names = f" {AHEAD_NAMES}" if looks_ahead(vllm_config) else ""
    return f"{draft.method}{length}{names} {fingerprint(model)} {named}"[:MAX_TEXT]


def _weights_of(model: Any, loading: Any, settings: Settings) -> str:
    """The name of a model's weights. `loading`: vLLM's load configuration of it."""
    if settings.revision:
        return settings.revision
    if str(getattr(loading, "load_format", "")) == "dummy":
        raise Unfit(
            "load_format is dummy, so the model's files do not name the weights: set "
            "kv_connector_extra_config.revision to a name of them that no others have had, the same on both sides"
        )
    return weights_revision(*_files_of(model, loading))


def _files_of(model: Any, loading: Any) -> tuple[str, str | None, str | None]:
    """Where a model's files are, as `weights_revision` takes it. A draft model has a revision of its own: none is not
    the model's, even where their files are the same. It is loaded as the model is (`draft_of` sees to that)."""
    return model.model, getattr(model, "revision", None), getattr(loading, "download_dir", None)


def kv_scales(vllm_config: Any) -> str:
    """The name of the scales with which the KV cache is quantized, a draft model's too: a hash over those in the
    weights' files. Empty where it is not quantized, or the files have none: they are 1 then. Unfit where a file cannot
    be read."""
    if not is_quantized(vllm_config.cache_config):
        return ""
    found = _scales_of(*_files_of(vllm_config.model_config, vllm_config.load_config))
    if (draft := draft_of(vllm_config)) is not None:
        drafts = _scales_of(*_files_of(draft.draft_model_config, vllm_config.load_config))
        found |= {f"draft {name}": scale for name, scale in drafts.items()}
    if not found:
        return ""
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(f"{name}:{len(found[name])}\n".encode() + found[name])
    return total.hexdigest()


def _scales_of(model: str, revision: str | None, cache: str | None) -> dict[str, bytes]:
    folder = Path(model) if Path(model).is_dir() else downloaded(model, revision, cache)
    found: dict[str, bytes] = {}
    for file in [] if folder is None else sorted(folder.glob("*.safetensors")):
        try:
            found |= scales_in(file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unfit(f"the scales of the KV cache cannot be read in {file}: {error!r}") from error
    return found


def scales_in(path: Path) -> dict[str, bytes]:
    """The scales of KV, by name, in a file of safetensors (format: README of github.com/huggingface/safetensors): dtype
    and bytes. ValueError where it is none."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 2 <= length <= min(MAX_HEADER_BYTES, path.stat().st_size - 8):
            raise ValueError(f"{path.name}: its header has {length} bytes; it must have 2 to {MAX_HEADER_BYTES}")
        found = {}
        for name, entry in json.loads(file.read(length)).items():
            if _KV_SCALE.search(name):
                first, end = entry["data_offsets"]
                file.seek(8 + length + first)
                found[name] = entry["dtype"].encode() + file.read(end - first)
    return found


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
    found = folder if folder.is_dir() else downloaded(path, None, None)
    files = [] if found is None else sorted(file for name in ADAPTER_FILES for file in found.glob(name))
    if not files:
        raise Unnamed(f"no files of its adapter, {path!r}, were found on this host")
    return files


def weights_revision(model: str, revision: str | None = None, cache: str | None = None) -> str:
    """The name of a model's weights by its files, see `revision_of_files`. Unfit says what to do where nothing names
    them."""
    found = revision_of_files(model, revision, cache)
    if found is not None:
        return found
    raise Unfit(
        f"no weight files of model {model!r} were found on this host, and engines with other weights must not share "
        "pages: set kv_connector_extra_config.revision to a name of the weights, the same on both sides"
        + ("" if Path(model).is_dir() else ", or start vLLM with a full commit hash as --revision")
    )
