"""vLLM's JSON specification of generated conversations ("filetype": "generate_conversations").

A turn there is a message, so 12 turns are 6 of ours. The common prefix becomes the system prompt; the conversation's
own stands before its first user's words. Sizes are words here, drawn from the text files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvferry.loadgen.distributions import Constant, Distribution, make
from kvferry.loadgen.scripts import WorkloadError
from kvferry.loadgen.words import WORDS
from kvferry.loadgen.workload import MultiTurn

MAX_SPEC_BYTES = 1 << 20
MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Messages(Distribution):
    """Numbers of exchanges, of a number of messages that is at least 2 and rounded up to an even one."""

    messages: Distribution

    def sample(self, source: np.random.Generator) -> float:
        return (self.messages.count(source, 2) + 1) // 2

    def __str__(self) -> str:
        return f"{self.messages} / 2"


def read_spec(path: Path, *, seed: int, vocabulary: int, think_s: Distribution) -> MultiTurn:
    """Raises WorkloadError naming the field. Text files are looked for beside the specification."""
    try:
        if path.stat().st_size > MAX_SPEC_BYTES:
            raise WorkloadError(f"{path}: has {path.stat().st_size} bytes; it may have {MAX_SPEC_BYTES}")
        spec = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{path}: {error}") from error
    try:
        return _workload(spec, path.parent, seed, vocabulary, think_s)
    except ValueError as error:
        raise WorkloadError(f"{path}: {error}") from None


def _workload(spec: object, folder: Path, seed: int, vocabulary: int, think_s: Distribution) -> MultiTurn:
    if not isinstance(spec, dict):
        raise ValueError(f"must be an object, got {type(spec).__name__}")
    if spec.get("filetype") != "generate_conversations":
        raise ValueError(f"filetype must be 'generate_conversations', got {spec.get('filetype')!r:.60}")
    conversations = spec.get("num_conversations")
    if type(conversations) is not int or conversations < 1:
        raise ValueError(f"num_conversations must be a whole number >= 1, got {conversations!r:.60}")
    files = spec.get("text_files", [])
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise ValueError(f"text_files must be a list of file names, got {files!r:.60}")
    none = Constant(0)
    return MultiTurn(
        conversations=conversations,
        turns_each=Messages(_distribution(spec, "prompt_input", "num_turns", None)),
        user_words=_distribution(spec, "prompt_input", "num_tokens", None),
        output_tokens=_distribution(spec, "prompt_output", "num_tokens", None),
        system_words=_distribution(spec, "prompt_input", "common_prefix_num_tokens", none),
        own_words=_distribution(spec, "prompt_input", "prefix_num_tokens", none),
        think_s=think_s,
        seed=seed,
        vocabulary=vocabulary,
        source=_words([folder / name for name in files]) if files else WORDS,
        label="generate_conversations",
    )


def _distribution(spec: Mapping[str, object], section: str, name: str, default: Distribution | None) -> Distribution:
    fields = spec.get(section)
    if not isinstance(fields, dict):
        raise ValueError(f"{section} must be an object, got {fields!r:.60}")
    given = fields.get(name)
    if given is None and default is not None:
        return default
    if not isinstance(given, dict) or not isinstance(given.get("distribution"), str):
        raise ValueError(f"{section}.{name}.distribution must be the name of one, got {given!r:.60}")
    try:
        parameters = {key: value for key, value in given.items() if key != "distribution" and value is not None}
        return make(given["distribution"], parameters)
    except ValueError as error:
        raise ValueError(f"{section}.{name}: {error}") from None


def _words(paths: list[Path]) -> list[str]:
    words: list[str] = []
    for path in paths:
        try:
            if path.stat().st_size > MAX_TEXT_BYTES:
                raise ValueError(f"text_files: {path} has {path.stat().st_size} bytes; it may have {MAX_TEXT_BYTES}")
            words += path.read_text(encoding="utf-8", errors="replace").split()
        except OSError as error:
            raise ValueError(f"text_files: {path}: {error.strerror}") from error
    if not words:
        raise ValueError("text_files: there is not one word in them")
    return words
