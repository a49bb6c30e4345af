"""Scripts of what the users of a run say: one a conversation, in text or in token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

FIRST_TOKEN = 32  # token ids below are control characters of the byte tokenizer, and special tokens of many others


_TEXTS = tuple(map(str, range(1 << 15)))


class WorkloadError(ValueError):
    """A workload that cannot be; the message names the field, its value and its bound."""


@dataclass(frozen=True, slots=True)
class TextTurn:
    text: str
    max_tokens: int  # of the reply
    think_s: float = 0.0  # from the last reply's end; not of the first turn


@dataclass(frozen=True, slots=True)
class TextScript:
    """One conversation's user side."""

    system: str  # "" without one
    turns: tuple[TextTurn, ...]


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Token ids as they stand in a body: `1,2,3`."""

    json: bytes
    count: int


@dataclass(frozen=True, slots=True)
class TokenTurn:
    runs: tuple[TokenRun, ...]
    max_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenScript:
    turns: tuple[TokenTurn, ...]


class Workload(Protocol):
    """The scripts of a run. The same workload gives the same scripts."""

    @property
    def name(self) -> str:
        """The workload in words, with its sizes."""

    @property
    def conversations(self) -> int: ...

    def turns(self, conversation: int) -> int: ...

    def start_s(self, conversation: int) -> float | None:
        """The conversation's start, in seconds from the run's start; None: the workload does not say."""

    def text(self, conversation: int) -> TextScript:
        """The conversation's script in text. Raises WorkloadError where it has no text."""

    def tokens(self, conversation: int) -> TokenScript:
        """The conversation's script in token ids. Raises WorkloadError where it has none."""


def token_run(tokens: Sequence[int]) -> TokenRun:
    largest = max(tokens, default=0)
    text = _TEXTS.__getitem__ if largest < len(_TEXTS) else str  # looked up is quicker than made
    words = list(map(text, tokens))
    return TokenRun(",".join(words).encode(), len(words))


def check_vocabulary(vocabulary: int) -> int:
    if vocabulary <= FIRST_TOKEN:
        raise WorkloadError(f"vocabulary must be > {FIRST_TOKEN}, got {vocabulary}")
    return vocabulary
