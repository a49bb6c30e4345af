"""A scheduler's half of the connector without vLLM: requests, and a daemon that holds what it is told to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvferry.connectors.prompt_chain import KeysBetween
from kvferry.connectors.scheduler_decode import DecodeScheduler
from kvferry.connectors.scheduler_prefill import PrefillScheduler
from kvferry.connectors.scheduler_side import SchedulerSide, Shape
from kvferry.connectors.weights_epoch import WeightsEpoch
from kvferry.radix.digests import DIGEST_BYTES, chain_digests

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
    resumable: bool = False
    priority: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.output

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(range(self.prompt))

    @property
    def all_token_ids(self) -> list[int]:
        return list(range(self.num_tokens))

    def digests(self, tokens: int, page_size: int, root: bytes | None = None) -> bytes:
        """Of the full pages of its first `tokens`."""
        extra = [self.adapter] if self.adapter else None
        return chain_digests(np.arange(tokens), page_size=page_size, parent=root, extra=extra).tobytes()


def keys_of(request: object) -> KeysBetween | None:
    assert isinstance(request, Request)
    if request.adapter == "?":
        return _unknown
    return (lambda start, end: [request.adapter]) if request.adapter else None


def _unknown(start: int, end: int) -> list[str]:
    raise KeyError("an adapter that the engine does not know")


@dataclass
class Daemon:
    """Holds the first `pages` of every prompt."""

    up: bool = True
    daemon: str = "p"
    most_pages: int = 0
    keeps: bool = True
    pages: int = 0
    fetch_tokens: int = 0
    asked: list[bytes] = field(default_factory=list)
    asked_again: int = 0
    flushed: int = 0
    namespaces: list[bytes] = field(default_factory=list)

    def set_namespace(self, namespace_id: bytes) -> None:
        self.namespaces.append(namespace_id)

    def ask_again(self) -> None:
        self.asked_again += 1

    def flush(self) -> None:
        self.flushed += 1

    def held_pages(self, digests: bytes) -> int:
        self.asked.append(digests)
        return min(self.pages, len(digests) // DIGEST_BYTES)


def decode(daemon: Daemon, per_page: int = 1, weights: str = "", *, looks_ahead: bool = False) -> DecodeScheduler:
    epoch = WeightsEpoch(lambda: weights)
    return DecodeScheduler(Shape(BLOCK, per_page), daemon, keys_of=keys_of, epoch=epoch, looks_ahead=looks_ahead)


def prefill(daemon: Daemon, per_page: int = 1, weights: str = "", *, looks_ahead: bool = False) -> PrefillScheduler:
    epoch = WeightsEpoch(lambda: weights)
    return PrefillScheduler(Shape(BLOCK, per_page), daemon, keys_of=keys_of, epoch=epoch, looks_ahead=looks_ahead)


def blocks(tokens: int) -> list[int]:
    return [50 + i for i in range(-(-tokens // BLOCK))]


def orders(side: SchedulerSide, **scheduled: int) -> list[object]:
    return list(side.step(scheduled, (), lambda request: blocks(1000)).orders)
