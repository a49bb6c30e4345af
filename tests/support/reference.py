"""One conversation in plain transformers: no pages, no daemons, one process, one dynamic cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvferry.workers.models.sampling import Sampling, sample
from tests.support.engines import Turn

GREEDY = Sampling()

NEAR_TIE = 1e-3
"""Where the reference's two best logits are this close, rounding decides, and another token is no mistake."""


@dataclass
class Comparison:
    """Of a system's tokens with the reference's."""

    tokens: int = 0
    differences: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)  # differences that are no near tie
    smallest_gap: float = float("inf")  # of the reference's two best logits

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, {len(self.differences)} differ at a near tie; the two best logits are at least "
            f"{self.smallest_gap:.2g} apart"
        )


class Conversation:
    """Its cache is kept from turn to turn: what the system's prefill server still held of a prompt is taken from there,
    and the rest computed in the same chunks."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._held: list[int] = []  # the tokens whose KV is in the cache

    def compare(self, prompt: Sequence[int], turn: Turn, into: Comparison, sampling: Sampling = GREEDY) -> None:
        """Follows the turn along the system's own tokens."""
        assert turn.chunk_ends[-1] == len(prompt)
        self._keep(prompt, turn.prefill_matched)
        ends = [turn.prefill_matched, *turn.chunk_ends] if len(self._held) < turn.prefill_matched else turn.chunk_ends
        for end in ends:
            logits = self._forward(list(prompt[len(self._held) : end]))
        for position, token in enumerate(turn.output, len(prompt)):
            best = logits.topk(2)
            gap = float(best.values[0] - best.values[1])
            into.tokens += 1
            into.smallest_gap = min(into.smallest_gap, gap)
            expected = sample(logits, sampling, position)
            if token != expected:
                what = f"position {position}: {token}, the reference has {expected}; its two best are {gap:.2g} apart"
                near_tie = sampling.temperature == 0 and gap <= NEAR_TIE and token == int(best.indices[1])
                (into.differences if near_tie else into.mistakes).append(what)
            logits = self._forward([token])

    def _keep(self, prompt: Sequence[int], tokens: int) -> None:
        """Crops the cache to what it shares with the first `tokens` tokens of `prompt`."""
        same = 0
        while same < min(tokens, len(self._held)) and self._held[same] == prompt[same]:
            same += 1
        if same == 0:
            self._cache = DynamicCache(config=self._model.config)
        elif same < len(self._held):
            self._cache.crop(same - len(self._held))
        del self._held[same:]

    @torch.inference_mode()
    def _forward(self, tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([tokens])
        logits = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        self._held += tokens
        assert self._cache.get_seq_length() == len(self._held)
        return logits[0, -1]
