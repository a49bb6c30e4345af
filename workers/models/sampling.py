"""The choice of a token from logits. No state: a token's random number depends on the seed and the token's position
alone, so a request gives the same tokens whichever process computes which of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.proto import engine_pb2

if TYPE_CHECKING:
    import torch


class Sampling(NamedTuple):
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0

    @classmethod
    def from_proto(cls, message: engine_pb2.Sampling) -> Sampling:
        """Raises ValueError naming field, value and bound."""
        if not (math.isfinite(message.temperature) and message.temperature >= 0):
            raise ValueError(f"sampling.temperature is {message.temperature}; it must be finite and at least 0")
        if not 0 <= message.top_p <= 1:
            raise ValueError(f"sampling.top_p is {message.top_p}; it must be 0 to 1")
        return cls(message.temperature, message.top_p or 1.0, message.top_k, message.seed)


def uniform(seed: int, position: int) -> float:
    """A number of [0, 1) that is a function of seed and position (Philox, counter-based)."""
    return float(np.random.Generator(np.random.Philox(key=np.array([seed, position], dtype=np.uint64))).random())


def sample(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """The token at `position` of the sequence, from its logits, shape (vocabulary,)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    # float64 on the CPU, sorted: the same token on every machine whose logits are the same
    scaled = logits.double().cpu() / sampling.temperature
    values, tokens = scaled.sort(descending=True, stable=True)
    if sampling.top_k:
        values, tokens = values[: sampling.top_k], tokens[: sampling.top_k]
    cumulative = values.softmax(0).cumsum(0)
    # the smallest set of tokens whose probability reaches top_p: at least one
    kept = 1 + int((cumulative < sampling.top_p).sum()) if sampling.top_p < 1 else len(cumulative)
    kept = min(kept, len(cumulative))
    point = uniform(sampling.seed, position) * float(cumulative[kept - 1])
    return int(tokens[min(int((cumulative[:kept] <= point).sum()), kept - 1)])
