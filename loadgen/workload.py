"""Seeded multi-turn conversations: what the users say. The same seed gives the same conversations, whatever their
number."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvferry.loadgen.words import WORDS

FIRST_TOKEN = 32  # token ids below are control characters of the byte tokenizer, and special tokens of many others


@dataclass(frozen=True, slots=True)
class Workload:
    conversations: int
    turns: int
    user_words: int  # of one turn
    system_words: int = 0  # of the system prompt that all conversations share; 0: none
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, bound in (
            ("conversations", self.conversations, 1),
            ("turns", self.turns, 1),
            ("user_words", self.user_words, 1),
            ("system_words", self.system_words, 0),
        ):
            if value < bound:
                raise ValueError(f"{name} must be >= {bound}, got {value}")


@dataclass(frozen=True, slots=True)
class TextScript:
    """One conversation's user side."""

    system: str  # "" without one
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenScript:
    """The same in token ids."""

    system: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]


def text_script(workload: Workload, conversation: int) -> TextScript:
    shared = _random(workload, "system")
    own = _random(workload, f"conversation {conversation}")
    return TextScript(
        system=_sentence(shared, workload.system_words) if workload.system_words else "",
        turns=tuple(_sentence(own, workload.user_words) for _ in range(workload.turns)),
    )


def token_script(workload: Workload, conversation: int, vocabulary: int) -> TokenScript:
    """With as many tokens as the workload has words, of ids [32, vocabulary)."""
    if vocabulary <= FIRST_TOKEN:
        raise ValueError(f"vocabulary must be > {FIRST_TOKEN}, got {vocabulary}")
    shared = _random(workload, "system")
    own = _random(workload, f"conversation {conversation}")
    return TokenScript(
        system=_tokens(shared, workload.system_words, vocabulary),
        turns=tuple(_tokens(own, workload.user_words, vocabulary) for _ in range(workload.turns)),
    )


def _random(workload: Workload, purpose: str) -> random.Random:
    return random.Random(f"{workload.seed} {purpose}")


def _sentence(source: random.Random, words: int) -> str:
    return " ".join(source.choice(WORDS) for _ in range(words)).capitalize() + "."


def _tokens(source: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(source.randrange(FIRST_TOKEN, vocabulary) for _ in range(count))
