"""Prefixes that an operator holds in the cache for a time. Core: no I/O, time is passed in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.errors import exhausted, not_found
from kvferry.daemon.core.namespaces import Namespace
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.tree import Lock

MAX_PINS = 1024
MAX_PIN_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Pin:
    number: int
    namespace: Namespace
    lock: Lock
    until: float
    pages: int
    digests: bytes


class Unlocking(Protocol):
    """The way in which locks are given up (`Holds`)."""

    def abandoned(self, namespace: Namespace, lock: Lock) -> int | None: ...

    def unlock(self, namespace: Namespace, lock: Lock) -> None: ...


class Pins:
    def __init__(self, cache: Cache, holds: Unlocking) -> None:
        self._cache = cache
        self._holds = holds
        self._pins: dict[int, Pin] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._pins)

    def all(self) -> list[Pin]:
        return list(self._pins.values())

    def pin(self, namespace: Namespace, digests: bytes, until: float) -> Pin:
        """Holds what is held of the prompt, in whichever tier; pages on their way are left out. NOT_FOUND where that is
        nothing; RESOURCE_EXHAUSTED beyond MAX_PINS, or where running requests were promised the pages.
        """
        if len(self._pins) >= MAX_PINS:
            raise exhausted(f"{len(self._pins)} pins are held; the bound is {MAX_PINS}")
        tree = namespace.tree
        match = tree.match(digests)
        if (readable := self._cache.readable(namespace, digests)) < match.device_pages:
            match = tree.match(digests[: readable * DIGEST_BYTES])
        if match.pages == 0:
            raise not_found(
                f"nothing of this prompt is held; digests must be of pages of {self._cache.page_size} tokens"
            )
        lock = tree.lock(match)
        if not self._cache.fits(namespace, 0):
            pages = lock.pages
            tree.unlock(lock)
            raise exhausted(
                f"{pages} pages cannot be pinned: {self._cache.promised} are promised to running requests, and only "
                f"{self._cache.available()} more can be had"
            )
        pin = Pin(self._next, namespace, lock, until, lock.pages, digests[: lock.pages * DIGEST_BYTES])
        self._next += 1
        self._pins[pin.number] = pin
        namespace.pinned_pages += pin.pages
        return pin

    def unpin(self, number: int) -> int:
        """Lets one pin go, by its number; 0: all. Returns how many there were."""
        chosen = list(self._pins.values()) if number == 0 else [p for p in (self._pins.get(number),) if p]
        for pin in chosen:
            del self._pins[pin.number]
            pin.namespace.pinned_pages -= pin.pages
            self._holds.unlock(pin.namespace, pin.lock)
        return len(chosen)

    def shorten(self, namespace: Namespace) -> None:
        """After a restore has failed: nobody brings the lost pages of a prefix that only pins hold. They end before."""
        for pin in [pin for pin in self._pins.values() if pin.namespace is namespace]:
            left = self._holds.abandoned(namespace, pin.lock)
            if left is None:
                continue
            digests = pin.digests[: left * DIGEST_BYTES]
            lock = namespace.tree.lock(namespace.tree.match(digests))
            self._holds.unlock(namespace, pin.lock)
            self._pins[pin.number] = dataclasses.replace(pin, lock=lock, pages=left, digests=digests)
            namespace.pinned_pages -= pin.pages - left

    def expire(self, now: float) -> None:
        for pin in [pin for pin in self._pins.values() if pin.until <= now]:
            self.unpin(pin.number)
