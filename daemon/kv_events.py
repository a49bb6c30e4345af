"""What enters and leaves each tier, as events for routers that know where prefixes are cached. Core: no I/O.

A page counts from the moment it is readable until it is freed, as its pool says (`PagePool.take_readable`); its digest
is known by `name_device` or `name_host`, said whenever a page comes into a tree. Two namespaces may hold the same
digest: it is stored once, with the first page, and removed with the last one.

A device page is announced with its tokens, which routers hash themselves. No token is kept here: once a request is
ready its worker is told from where on tokens are wanted (`wanted_from`), and what it sends goes into the events.
A device page whose tokens nobody sent is not announced. Host pages are announced by their digest alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PagePool

Medium: TypeAlias = Literal["GPU", "CPU"]
MAX_PAGES = 4096  # of one event


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages in prompt order, behind `parent` (None: the prompt's first). `tokens`: all of theirs; none on the host."""

    medium: Medium
    digests: tuple[bytes, ...]
    parent: bytes | None = None
    tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Removed:
    medium: Medium
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is held: the daemon has just started."""


KvEvent: TypeAlias = Stored | Removed | Cleared


class EventSink(Protocol):
    """Who is told what enters and leaves the tiers."""

    endpoint: str
    replay: str
    blocks: Counter[tuple[str, Medium]]  # by event and medium
    batches: int
    queue_dropped: int
    subscriber_dropped: int

    @property
    def replays_cut_off(self) -> Counter[str]:
        """By reason: "stalled" or "gone"."""

    def publish(self, events: Sequence[KvEvent]) -> None: ...


@dataclass(slots=True)
class _Tier:
    pool: PagePool
    digests: dict[int, bytes] = field(default_factory=dict)  # by page id, of pages in a tree
    readable: dict[bytes, int] = field(default_factory=dict)  # pages by digest
    announced: set[bytes] = field(default_factory=set)

    def is_fresh(self, digest: bytes) -> bool:
        return digest in self.readable and digest not in self.announced

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Digests that became readable, and announced ones that are no more."""
        came: list[bytes] = []
        gone: list[bytes] = []
        for change in self.pool.take_readable():
            if change >= 0:
                digest = self.digests[change]
                self.readable[digest] = self.readable.get(digest, 0) + 1
                came.append(digest)
                continue
            digest = self.digests.pop(~change)
            left = self.readable[digest] - 1
            if left:
                self.readable[digest] = left
                continue
            del self.readable[digest]
            if digest in self.announced:
                self.announced.remove(digest)
                gone.append(digest)
        return came, gone


class KvEventLog:
    """Of one store; `take` gives the events since the last time."""

    def __init__(self, page_size: int, device: PagePool, host: PagePool | None) -> None:
        self._page_size = page_size
        self._device = _Tier(device)
        self._host = _Tier(host) if host is not None else None
        for pool in (device, host):
            if pool is not None:
                pool.log_readable = True
        self._events: list[KvEvent] = [Cleared()]

    def name_device(self, pages: Iterable[int], digests: bytes) -> None:
        """These pages come into a tree, and will be readable then or later."""
        self._sync()  # what is said of these ids by now was said of their former digests
        self._device.digests.update(zip(pages, _split(digests), strict=True))

    def name_host(self, pages: Iterable[int], digests: bytes) -> None:
        assert self._host is not None
        self._sync()
        self._host.digests.update(zip(pages, _split(digests), strict=True))

    def wanted_from(self, digests: bytes) -> int:
        """Index of the first page of this path that is not announced: from there on tokens are wanted."""
        self._sync()
        announced = self._device.announced
        path = _split(digests)
        return next((index for index, digest in enumerate(path) if digest not in announced), len(path))

    def announce(self, digests: bytes, first: int, tokens: Sequence[int]) -> None:
        """`tokens` are those of the path's pages from index `first` on, all of them. What is not readable, or comes
        behind a page that is not announced, is passed over.
        """
        path = _split(digests)
        assert len(tokens) == (len(path) - first) * self._page_size, "tokens of other pages"
        self._sync()
        device = self._device
        at = first
        while at < len(path) and (at == 0 or path[at - 1] in device.announced):
            begin = at
            while at < len(path) and at - begin < MAX_PAGES and device.is_fresh(path[at]):
                at += 1
            if at == begin:
                if path[at] not in device.announced:
                    return
                at += 1
                continue
            run = tuple(path[begin:at])
            device.announced.update(run)
            parent = path[begin - 1] if begin else None
            of = tokens[(begin - first) * self._page_size : (at - first) * self._page_size]
            self._events.append(Stored("GPU", run, parent, of))

    def take(self) -> list[KvEvent]:
        self._sync()
        events, self._events = self._events, []
        return events

    def _sync(self) -> None:
        """What moved to the host is stored there before it is removed from the device."""
        host_gone: list[bytes] = []
        if self._host is not None:
            came, host_gone = self._host.changes()
            fresh = [digest for digest in dict.fromkeys(came) if self._host.is_fresh(digest)]
            self._host.announced.update(fresh)
            back = set(fresh) & set(host_gone)  # gone and here again since the last time: nothing has changed
            self._events += [Stored("CPU", run) for run in _runs([d for d in fresh if d not in back])]
            host_gone = [digest for digest in host_gone if digest not in back]
        _, gone = self._device.changes()
        self._events += [Removed("GPU", run) for run in _runs(gone)]
        self._events += [Removed("CPU", run) for run in _runs(host_gone)]


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def _runs(digests: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    return [tuple(digests[at : at + MAX_PAGES]) for at in range(0, len(digests), MAX_PAGES)]
