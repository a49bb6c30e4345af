"""Messages between the halves of a connector. Block ids are the engine's, page ids the daemon's.

Decode:  Load or Restore -> (reported received); at the end StorePages -> (reported sent)
Prefill: Begin -> (reported received, where it loads) -> Save* -> FirstToken? -> Release or Drop -> (reported sent)
         Begin that waits -> (News.found) -> Fill? -> (reported received) -> Save* and so on
Cancel ends a load, of a Begin too: it is still reported received, once, when nothing touches the blocks any more; where
that had been reported already, nothing is. It also ends a Begin that waits, of which nothing is reported. Forget ends
everything that was ordered before it: loads are reported with all of their blocks bad, stores without having been made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvferry.client.requests import RequestName


@dataclass(frozen=True, slots=True)
class PromptPages:
    """Digests of the full pages, count of tokens and digest of the tokens behind the last full page."""

    digests: bytes
    tokens: int
    tail_digest: bytes = b""

    @property
    def words(self) -> dict[str, Any]:
        """The fields of an Admit or Begin."""
        return {"digests": self.digests, "tokens": self.tokens, "tail_digest": self.tail_digest}


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens [start, prompt.tokens) into `blocks`, which begin at token `start`; the engine holds what is before it, in
    `held_blocks`."""

    request: str
    name: RequestName
    prompt: PromptPages
    prefill: str  # name of the prefill daemon
    start: int
    held_blocks: tuple[int, ...]
    blocks: tuple[int, ...]
    traceparent: str = ""  # W3C, of the request's span in the engine; empty: none


@dataclass(frozen=True, slots=True)
class Restore:
    """Tokens [start, prompt.tokens) of what the daemon holds into `blocks`; behind them the prompt has one token more,
    whose digest is `prompt.tail_digest`."""

    request: str
    name: RequestName
    prompt: PromptPages
    start: int
    blocks: tuple[int, ...]
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class StorePages:
    """The full pages of a finished request, in `blocks`, to the daemon as far as it lacks them."""

    request: str
    name: RequestName
    prompt: PromptPages
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """A prompt whose pages are to be sent. Where `blocks` are given, tokens [start, end) of it, which the daemon was
    found to hold, are loaded into them first. `waits`: the engine has no blocks for it yet, and waits for what the
    daemon may fetch. The first `held` tokens it has itself."""

    request: str
    name: RequestName
    prompt: PromptPages
    start: int = 0
    end: int = 0
    blocks: tuple[int, ...] = ()
    traceparent: str = ""
    waits: bool = False
    held: int = 0


@dataclass(frozen=True, slots=True)
class Fill:
    """Tokens [start, end) of a prompt that waited, which the daemon has or can fetch, into `blocks`; the engine holds
    what is before them, in `held_blocks`."""

    request: str
    start: int
    end: int
    held_blocks: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """The first `tokens` tokens of the prompt are in `blocks` when this step's forward pass is over."""

    request: str
    tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of the reply is sampled, and the prefill request goes on."""

    request: str
    token: int


@dataclass(frozen=True, slots=True)
class Release:
    """The prefill request is over; its blocks are wanted back once all that was saved is copied. `token`: the first of
    its reply; None: it was aborted before."""

    request: str
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """The prefill request is over before all was saved, or was preempted since; its blocks are wanted back. `token`: as
    of Release."""

    request: str
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """The request is over while its load was under way, as far as the scheduler knows."""

    request: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The weights' epoch is another one: what was ordered before is to have no effect any more."""


Order: TypeAlias = Load | Restore | StorePages | Begin | Fill | Save | FirstToken | Release | Drop | Cancel | Forget


@dataclass(frozen=True, slots=True)
class News:
    """Facts that the worker's half tells the scheduler's, beside what vLLM passes on by itself."""

    failed: frozenset[str] = frozenset()  # requests whose prompts are not sent
    sessions: Mapping[int, bool] = field(default_factory=dict)  # by rank: whether it has one with the daemon, if new
    first: Mapping[str, int] = field(default_factory=dict)  # of loads that end well: the reply's first token
    bad: frozenset[str] = frozenset()  # requests whose loads have not ended well, on some rank
    found: Mapping[str, int] = field(default_factory=dict)  # by prompt that waits: tokens that the daemon has of it now
    namespace: bytes = b""  # of the engine's pages; empty: it is as it was

    def then(self, later: News) -> News:
        """Both: of one rank, one behind the other, or of two ranks."""
        sessions = {**self.sessions, **later.sessions}
        first, found = {**self.first, **later.first}, {**self.found, **later.found}
        namespace = later.namespace or self.namespace
        return News(self.failed | later.failed, sessions, first, self.bad | later.bad, found, namespace)


@dataclass(slots=True)
class Orders:
    """The orders of one step. The blocks of preempted requests are taken away before the step's forward pass."""

    orders: list[Order] = field(default_factory=list)
    preempted: tuple[str, ...] = ()
