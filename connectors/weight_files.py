"""What names a model's weights: the files on this host."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SAMPLES, SAMPLE_BYTES = 64, 64 * 1024
_COMMIT = re.compile("[0-9a-f]{40}")


def revision_of_files(model: str, revision: str | None = None, cache: str | None = None) -> str | None:
    """Hash over the weight files' names, sizes and samples of their contents. `model`: a folder, a file, or a name at
    Hugging Face, whose `revision` is looked for in the folder `cache` of what was downloaded; where its weights are not
    there, a full commit hash names them as well. None: nothing does."""
    path = Path(model)
    if path.is_file():
        return hash_of([path])
    folder = path if path.is_dir() else downloaded(model, revision, cache)
    if folder is not None:
        for pattern in WEIGHT_FILES:
            if files := sorted(folder.glob(pattern)):
                return hash_of(files)
    if folder is not path and revision is not None and _COMMIT.fullmatch(revision):
        return hashlib.sha256(f"{model}@{revision}".encode()).hexdigest()
    return None


def downloaded(model: str, revision: str | None, cache: str | None) -> Path | None:
    """The folder of a model of Hugging Face's on this host; nothing is fetched, and some of its files may lack."""
    from huggingface_hub import snapshot_download

    try:
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
