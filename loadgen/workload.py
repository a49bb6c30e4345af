"""Seeded multi-turn conversations. The same seed gives the same conversations, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvferry.loadgen.distributions import Constant, Distribution, generator, generator_for
from kvferry.loadgen.scripts import (
    FIRST_TOKEN,
    TextScript,
    TextTurn,
    TokenRun,
    TokenScript,
    TokenTurn,
    WorkloadError,
    check_vocabulary,
    token_run,
)
from kvferry.loadgen.words import WORDS


@dataclass(frozen=True)
class MultiTurn:
    """Conversations of several turns. Sizes are words of text, or as many token ids. A conversation begins with what
    all share, then with words of its own, then with its first user's."""

    conversations: int
    turns_each: Distribution
    user_words: Distribution
    output_tokens: Distribution
    system_words: Distribution = field(default_factory=lambda: Constant(0))  # shared by all
    own_words: Distribution = field(default_factory=lambda: Constant(0))  # of one conversation, before its first turn
    think_s: Distribution = field(default_factory=lambda: Constant(0))
    seed: int = 0
    vocabulary: int = 256
    source: Sequence[str] = WORDS  # of text
    label: str = "multi-turn"

    def __post_init__(self) -> None:
        if self.conversations < 1:
            raise WorkloadError(f"conversations must be >= 1, got {self.conversations}")
        check_vocabulary(self.vocabulary)

    @property
    def name(self) -> str:
        sizes = f"turns {self.turns_each}, user {self.user_words}, output {self.output_tokens}"
        return f"{self.label}: {self.conversations} conversations, {sizes}, shared {self.system_words}"

    def turns(self, conversation: int) -> int:
        return self._count(self.turns_each, 1, "turns", conversation)

    def start_s(self, conversation: int) -> float | None:
        return None

    def text(self, conversation: int) -> TextScript:
        content = self._random("conversation", conversation)
        own = self._count(self.own_words, 0, "own", conversation)
        before = f"{_sentence(content, own, self.source)} " if own else ""
        turns = []
        for k, (words, output, think_s) in enumerate(self._turn_sizes(conversation)):
            text = _sentence(content, words, self.source)
            turns.append(TextTurn(before + text if k == 0 else text, output, think_s))
        return TextScript(self._shared_text, tuple(turns))

    def tokens(self, conversation: int) -> TokenScript:
        content = self._random("conversation", conversation)
        own = self._count(self.own_words, 0, "own", conversation)
        first = (self._shared_run, random_run(content, own, self.vocabulary))
        turns = []
        for k, (words, output, think_s) in enumerate(self._turn_sizes(conversation)):
            run = random_run(content, words, self.vocabulary)
            turns.append(TokenTurn((*first, run) if k == 0 else (run,), output, think_s))
        return TokenScript(tuple(turns))

    @cached_property
    def _shared_text(self) -> str:
        return _sentence(self._random("system"), self._shared_words, self.source) if self._shared_words else ""

    @cached_property
    def _shared_run(self) -> TokenRun:
        return random_run(self._random("system"), self._shared_words, self.vocabulary)

    @cached_property
    def _shared_words(self) -> int:
        return self._count(self.system_words, 0, "system size")

    def _turn_sizes(self, conversation: int) -> list[tuple[int, int, float]]:
        """For each turn: the user's words, tokens of the reply, seconds before it."""
        sizes = (self.user_words, self.output_tokens, self.think_s)
        source = generator_for(sizes, self.seed, "sizes", conversation)
        return [
            (
                self.user_words.count(source, 1),
                self.output_tokens.count(source, 1),
                self.think_s.sample(source) if k else 0.0,
            )
            for k in range(self.turns(conversation))
        ]

    def _count(self, size: Distribution, least: int, *purpose: str | int) -> int:
        return size.count(generator_for((size,), self.seed, *purpose), least)

    def _random(self, *purpose: str | int) -> np.random.Generator:
        return generator(self.seed, *purpose)


def random_run(source: np.random.Generator, count: int, vocabulary: int) -> TokenRun:
    """`count` token ids of [32, vocabulary)."""
    return token_run(source.integers(FIRST_TOKEN, vocabulary, count).tolist())


def _sentence(source: np.random.Generator, count: int, words: Sequence[str]) -> str:
    return " ".join(words[i] for i in source.integers(0, len(words), count).tolist()).capitalize() + "."
