"""Times that a stated model on stated GPUs takes: prompts, decode steps, transfers. Pure; they are the model's own."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A prefill worker computes one prompt at a time, in order of arrival. A decode worker's sequences step together. A
    worker's link carries one transfer into it at a time."""

    name: str
    prefill_tokens_per_s: float
    prefill_context_ns: float  # more for each token, for each 1,000 tokens before it
    decode_step_ms: float  # of a step, whatever its batch
    decode_sequence_us: float  # more for each sequence of the batch
    decode_context_ns: float  # more for each token of context of the batch
    kv_bytes_per_token: int
    transfer_gb_per_s: float  # into a worker
    transfer_latency_ms: float
    restore_gb_per_s: float  # from the host tier

    def __post_init__(self) -> None:
        """ValueError names the field, its value and its bound."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{field.name} must be a number, got {value!r:.60}")
            positive = field.name.endswith("_per_s") or field.name == "kv_bytes_per_token"
            if value < 0 or (positive and value == 0):
                raise ValueError(f"{field.name} must be {'>' if positive else '>='} 0, got {value!r}")

    def prompt_s(self, start: int, end: int) -> float:
        """Seconds to compute the prompt's tokens [start, end) behind those before."""
        context = (start + end) / 2000
        return (end - start) * (1 / self.prefill_tokens_per_s + context * self.prefill_context_ns * 1e-9)

    def step_s(self, batch: int, context: int) -> float:
        """One step of `batch` sequences that have `context` tokens together."""
        return (
            self.decode_step_ms * 1e-3
            + batch * self.decode_sequence_us * 1e-6
            + context * self.decode_context_ns * 1e-9
        )

    def transfer_s(self, tokens: int) -> float:
        """Seconds to move the KV of so many tokens; 0 of none: nothing moves, and what is left is a message."""
        if not tokens:
            return 0.0
        return self.transfer_latency_ms * 1e-3 + tokens * self.kv_bytes_per_token / (self.transfer_gb_per_s * 1e9)

    def restore_s(self, tokens: int) -> float:
        return tokens * self.kv_bytes_per_token / (self.restore_gb_per_s * 1e9)

    def json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def read_engine_model(path: Path) -> EngineModel:
    """A JSON object of the fields; `note` may be there too. ValueError names file and field."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path}: has {path.stat().st_size} bytes; it may have {MAX_FILE_BYTES}")
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path}: must be an object, got {type(given).__name__}")
    names = {field.name for field in fields(EngineModel)}
    given.pop("note", None)
    for name in sorted(names ^ given.keys()):
        raise ValueError(f"{path}: {name} {'is missing' if name in names else 'is no field of an engine model'}")
    try:
        return EngineModel(**given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
