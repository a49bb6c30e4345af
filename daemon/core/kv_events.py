"""Events of what enters and leaves each tier, for routers that know where prefixes are cached. Core: no I/O.

A page counts from the moment it is readable until it is freed, as its pool says (`PagePool.take_readable`); its digest
is known by `name_device` or `name_host`, said whenever a page comes into a tree. Two namespaces may hold the same
digest: it is stored once, with the first page, and removed with the last one.

A device page is announced with its tokens, which routers hash themselves. No token is kept here: once a request is
ready its worker is told from where on tokens are wanted (`wanted_from`), and what it sends goes into the events.
A device page whose tokens nobody sent is not announced. Host pages are announced by their digest alone.

What a worker is told depends on its own namespace alone: tokens of a page that another one has sent are wanted again.
Where the chain is known (`TokenChain`) tokens are announced only if the page's digest is theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from kvferry.radix.digests import chain_digests, split_digests
from kvferry.radix.pool import PagePool
from kvferry.transfer.geometry.namespace import NamespaceFacts

Medium: TypeAlias = Literal["GPU", "CPU"]
MAX_PAGES = 4096  # of one event
CHECKED_ALGORITHM = "sha256_cbor"


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages that became readable, in prompt order, behind `parent` (None: the prompt's first). `tokens`: all of theirs;
    none in the host tier."""

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
    """The receiver of events on what enters and leaves the tiers."""

    endpoint: str
    replay: str
    blocks: Counter[tuple[str, Medium]]  # by event and medium
    batches: int
    queue_dropped: int
    subscriber_dropped: int

    @property
    def replays_cut_off(self) -> Counter[str]:
        """Replays that were cut off, by reason: "stalled" or "gone"."""

    def publish(self, events: Sequence[KvEvent]) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenChain:
    """The way from tokens to the digests of a daemon's pages. Pages with keys beside them (LoRA, images) do not fit."""

    root: bytes  # parent of first pages
    page_size: int
    digest_tokens: int  # of a digest; a page's is its last one's

    @staticmethod
    def of(facts: NamespaceFacts) -> TokenChain | None:
        """The chain of these facts; None where the algorithm is not known here."""
        if facts.digest_algorithm != CHECKED_ALGORITHM:
            return None
        page_size = facts.geometry.page_size
        return TokenChain(facts.root_digest, page_size, facts.digest_tokens or page_size)

    def fitting(self, path: Sequence[bytes], parent: bytes | None, tokens: Sequence[int]) -> int:
        """The number of pages of `path`, from its first on, that have these tokens' digests."""
        chained = chain_digests(tokens, page_size=self.digest_tokens, parent=parent or self.root)
        each = self.page_size // self.digest_tokens
        own = split_digests(chained[each - 1 :: each].tobytes())
        return next((at for at, digest in enumerate(path) if own[at] != digest), len(path))


@dataclass(slots=True)
class _Space:
    """One namespace's part of a tier."""

    readable: Counter[bytes] = field(default_factory=Counter)  # pages by digest
    told: set[bytes] = field(default_factory=set)  # digests whose tokens it has sent


@dataclass(slots=True)
class _Tier:
    pool: PagePool
    names: dict[int, tuple[_Space, bytes]] = field(default_factory=dict)  # by page id, of pages in a tree
    spaces: dict[bytes, _Space] = field(default_factory=dict)  # by namespace id
    readable: dict[bytes, int] = field(default_factory=dict)  # pages by digest, of all namespaces
    announced: set[bytes] = field(default_factory=set)

    def space(self, namespace: bytes) -> _Space:
        return self.spaces.setdefault(namespace, _Space())

    def name(self, namespace: bytes, pages: Iterable[int], digests: bytes) -> None:
        space = self.space(namespace)
        self.names.update((page, (space, digest)) for page, digest in zip(pages, split_digests(digests), strict=True))

    def is_fresh(self, digest: bytes) -> bool:
        return digest in self.readable and digest not in self.announced

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Digests that became readable, and announced ones that are no more."""
        came: list[bytes] = []
        gone: list[bytes] = []
        for change in self.pool.take_readable():
            if change >= 0:
                space, digest = self.names[change]
                space.readable[digest] += 1
                self.readable[digest] = self.readable.get(digest, 0) + 1
                came.append(digest)
                continue
            space, digest = self.names.pop(~change)
            space.readable[digest] -= 1
            if not space.readable[digest]:
                del space.readable[digest]
                space.told.discard(digest)
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
    """Events of one cache; `take` gives the events since the last time. `chain` None: tokens are believed."""

    def __init__(self, page_size: int, device: PagePool, host: PagePool | None, chain: TokenChain | None) -> None:
        self._page_size = page_size
        self._chain = chain
        self._device = _Tier(device)
        self._host = _Tier(host) if host is not None else None
        for pool in (device, host):
            if pool is not None:
                pool.log_readable = True
        self._events: list[KvEvent] = [Cleared()]

    def name_device(self, namespace: bytes, pages: Iterable[int], digests: bytes) -> None:
        """Names these pages, which come into a tree and will be readable then or later."""
        self._sync()  # what is said of these ids by now was said of their former digests
        self._device.name(namespace, pages, digests)

    def name_host(self, namespace: bytes, pages: Iterable[int], digests: bytes) -> None:
        assert self._host is not None
        self._sync()
        self._host.name(namespace, pages, digests)

    def wanted_from(self, namespace: bytes, digests: bytes) -> int:
        """Index of the path's first page whose tokens the namespace has not sent: from there on they are wanted."""
        self._sync()
        told = self._device.space(namespace).told
        path = split_digests(digests)
        return next((index for index, digest in enumerate(path) if digest not in told), len(path))

    def announce(self, namespace: bytes, digests: bytes, first: int, tokens: Sequence[int]) -> None:
        """`tokens` are those of the path's pages from index `first` on, all of them. What is not readable, is not of
        these tokens, or comes behind a page whose tokens the namespace has not sent, is passed over.
        """
        path = split_digests(digests)
        assert len(tokens) == (len(path) - first) * self._page_size, "tokens of other pages"
        self._sync()
        space = self._device.space(namespace)
        if first and path[first - 1] not in space.told:
            return
        end = first
        while end < len(path) and path[end] in space.readable:
            end += 1
        for begin in range(first, end, MAX_PAGES):
            run, parent = path[begin : min(begin + MAX_PAGES, end)], path[begin - 1] if begin else None
            at, size = (begin - first) * self._page_size, self._page_size
            if self._chain is not None and not self._chain.fitting(run[:1], parent, tokens[at : at + size]):
                return  # as at every turn of a prompt with keys: the rest is neither copied nor hashed
            of = tokens[at : at + len(run) * size]
            fit = len(run) if self._chain is None else self._chain.fitting(run, parent, of)
            self._store(space, path, begin, begin + fit, of)
            if fit < len(run):
                return

    def _store(self, space: _Space, path: Sequence[bytes], begin: int, end: int, tokens: Sequence[int]) -> None:
        """The namespace has sent the tokens of path[begin:end]: those not announced yet are."""
        device, at = self._device, begin
        space.told.update(path[begin:end])
        while at < end:
            start = at
            while at < end and device.is_fresh(path[at]):
                at += 1
            if at == start:
                at += 1
                continue
            run = tuple(path[start:at])
            device.announced.update(run)
            of = tokens[(start - begin) * self._page_size : (at - begin) * self._page_size]
            self._events.append(Stored("GPU", run, path[start - 1] if start else None, of))

    def take(self) -> list[KvEvent]:
        self._sync()
        events, self._events = self._events, []
        return events

    def _sync(self) -> None:
        """Brings the events up to date. What moved to the host tier is stored there before it is removed from the
        device."""
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


def _runs(digests: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    return [tuple(digests[at : at + MAX_PAGES]) for at in range(0, len(digests), MAX_PAGES)]
