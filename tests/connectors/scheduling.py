"""A scheduler's half of the connector without vLLM: requests, a daemon that answers when it is told to, a clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvferry.connectors.prompt_chain import KeysBetween
from kvferry.connectors.scheduler_decode import DecodeScheduler
from kvferry.connectors.scheduler_prefill import PrefillScheduler
from kvferry.connectors.scheduler_side import SchedulerSide, Shape
from kvferry.radix.digests import chain_digests

BLOCK = 8
ID = "ab" * 16
TO_DECODE = {"do_remote_prefill": True, "kvferry_request": ID, "kvferry_prefill": "p"}
TO_PREFILL = {"do_remote_decode": True, "kvferry_request": ID}


@dataclass
class Request:
    request_id: str
    prompt: int
    kv_transfer_params: dict[str, object] | None = None
    output: int = 0
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    adapter: str = ""
    trace_headers: dict[str, str] | None = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.output

    @property
    def all_token_ids(self) -> list[int]:
        return list(range(self.num_tokens))

    def digests(self, tokens: int, page_size: int) -> bytes:
        """Of the full pages of its first `tokens`."""
        extra = [self.adapter] if self.adapter else None
        return chain_digests(np.arange(tokens), page_size=page_size, extra=extra).tobytes()


def keys_of(request: object) -> KeysBetween | None:
    assert isinstance(request, Request)
    return (lambda start, end: [request.adapter]) if request.adapter else None


@dataclass
class Answer:
    tokens: int | None = None
    released: int = 0

    def release(self) -> None:
        self.released += 1


@dataclass
class Daemon:
    """Answers look-ups with `holds` tokens, once it is told to."""

    up: bool = True
    daemon: str = "p"
    most_pages: int = 0
    asked: list[tuple[bytes, Answer]] = field(default_factory=list)
    asked_again: int = 0

    def ask_again(self) -> None:
        self.asked_again += 1

    def start(self, digests: bytes) -> Answer:
        self.asked.append((digests, Answer()))
        return self.asked[-1][1]

    def holds(self, tokens: int) -> None:
        for _, answer in self.asked:
            answer.tokens = tokens


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def decode(daemon: Daemon, per_page: int = 1, clock: Clock | None = None) -> DecodeScheduler:
    return DecodeScheduler(Shape(BLOCK, per_page), daemon, clock or Clock(), keys_of=keys_of)


def prefill(daemon: Daemon, per_page: int = 1) -> PrefillScheduler:
    return PrefillScheduler(Shape(BLOCK, per_page), daemon, Clock(), keys_of=keys_of)


def blocks(tokens: int) -> list[int]:
    return [50 + i for i in range(-(-tokens // BLOCK))]


def orders(side: SchedulerSide, **scheduled: int) -> list[object]:
    return list(side.step(scheduled, (), lambda request: blocks(1000)).orders)
