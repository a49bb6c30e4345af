"""A decode and a prefill core whose effects are kept for the test to look at."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.effects import Effect, ToWorker
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.namespaces import Quota
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES

PAGE = 4
NAMESPACE, OTHER_TENANT = bytes(32), b"t" * 32
DEADLINE = 60.0
EffectT = TypeVar("EffectT")


def name(number: int, attempt: int = 1) -> Name:
    return Name(number.to_bytes(16, "big"), attempt)


def digests(prompt: str, pages: int) -> bytes:
    return b"".join(hashlib.sha256(f"{prompt}{i}".encode()).digest() for i in range(pages))


class Effects:
    def __init__(self) -> None:
        self.seen: list[Effect] = []

    def of(self, kind: type[EffectT]) -> list[EffectT]:
        """Those of the last step."""
        return [effect for effect in self.seen if isinstance(effect, kind)]

    def told(self, kind: str) -> list[wire.WorkerEvent]:
        return [effect.event for effect in self.of(ToWorker) if effect.event.WhichOneof("kind") == kind]


class Decode(Effects):
    def __init__(
        self, pages: int, host_pages: int = 0, *, queue: int = 8, quotas: Mapping[bytes, Quota] | None = None
    ) -> None:
        super().__init__()
        self.cache = Cache(pages, PAGE, host_pages=host_pages, limits=CacheLimits(quotas=quotas))
        limits = DecodeLimits(max_tokens=400, page_bytes=64, admission_seconds=30.0, queue=queue)
        self.core = DecodeCore(self.cache, limits)

    def admit(
        self,
        number: Name,
        prompt: str,
        pages: int,
        *,
        prefill: str = "p",
        new: int = 1,
        namespace: bytes = NAMESPACE,
        worker: int = 1,
        held: int = 0,
        deadline: float = DEADLINE,
        now: float = 0.0,
    ) -> None:
        """`held`: pages that the worker has in memory of its own."""
        request = wire.Admit(
            name=number.to_proto(),
            digests=digests(prompt, pages),
            tokens=pages * PAGE,
            prefill=prefill,
            max_new_tokens=new,
            held_tokens=held * PAGE,
        )
        self.core.admit(worker, namespace, number, request, deadline, now)
        self.take()

    def arrive(self, transfer: int, pages: Iterable[int], now: float = 0.0) -> None:
        """These prompt pages of a transfer."""
        self.core.pages_arrived(transfer, list(pages), now)
        self.take()

    def tick(self, now: float) -> None:
        self.core.tick(now)
        self.take()

    def take(self) -> None:
        self.seen = self.core.take_effects()


class Prefill(Effects):
    def __init__(self, pages: int = 16, *, table: int = 8, quotas: Mapping[bytes, Quota] | None = None) -> None:
        super().__init__()
        self.cache = Cache(pages, PAGE, limits=CacheLimits(quotas=quotas))
        self.core = PrefillCore(self.cache, PrefillLimits(table=table))

    def begin(self, number: Name, prompt: str, pages: int, *, namespace: bytes = NAMESPACE) -> None:
        begin = wire.Begin(name=number.to_proto(), digests=digests(prompt, pages), tokens=pages * PAGE)
        self.core.begin(1, namespace, number, begin, DEADLINE, 0.0)
        self.take()

    def ask(
        self, number: Name, transfer: int, prompt: str, pages: int, *, namespace: bytes = NAMESPACE, first: int = 0
    ) -> None:
        ask = peer.Ask(
            transfer=transfer,
            name=number.to_proto(),
            namespace_id=namespace,
            first_page=first,
            pages=pages - first,
            tokens=pages * PAGE,
            last_full_digest=digests(prompt, pages)[-DIGEST_BYTES:],
        )
        self.ask_as(ask, number)

    def ask_as(self, ask: peer.Ask, number: Name) -> None:
        self.core.ask(1, number, ask, DEADLINE, 0.0)
        self.take()

    def compute(self, number: Name, pages: int) -> None:
        self.core.progress(1, number, pages * PAGE, 0.0)
        self.core.aux(1, number, b"first token", 0.0)
        self.take()

    def take(self) -> None:
        self.seen = self.core.take_effects()
