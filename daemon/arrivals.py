"""Single flight: who brings each page that is on its way, and who waits for it. Core: no I/O.

An arriving page is brought by one lease (its filler) and may be waited for by others that matched it. When the filler
goes, the oldest waiter takes over by asking again; with no waiter the page has no filler until a new admission
matches it or its path is pruned.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.daemon.lease import Lease


class Arrivals:
    def __init__(self) -> None:
        self._filler: dict[int, Lease | None] = {}
        self._waiters: dict[int, dict[Lease, None]] = {}  # in order of admission; the filler among them

    def __len__(self) -> int:
        return len(self._filler)

    def __contains__(self, page: int) -> bool:
        return page in self._filler

    def expect(self, page: int, filler: Lease) -> None:
        """`page` is new and brought by `filler`, which waits for it."""
        assert page not in self._filler, f"page {page} is already arriving"
        self._filler[page] = filler
        self._waiters[page] = {filler: None}
        filler.filling.add(page)
        filler.missing.add(page)

    def follow(self, page: int, lease: Lease) -> bool:
        """`lease` waits for an arriving page. True: nobody brings it, so the lease has become its filler and must ask
        for it.
        """
        self._waiters[page][lease] = None
        lease.missing.add(page)
        if self._filler[page] is None:
            self._filler[page] = lease
            lease.filling.add(page)
            return True
        return False

    def filler(self, page: int) -> Lease | None:
        return self._filler[page]

    def arrived(self, page: int) -> list[Lease]:
        """The page is readable: forgets it and returns the leases that waited for it."""
        filler = self._filler.pop(page)
        if filler is not None:
            filler.filling.discard(page)
        waiters = list(self._waiters.pop(page))
        for lease in waiters:
            lease.missing.discard(page)
        return waiters

    def leave(self, lease: Lease) -> None:
        """The lease waits no more. It stays the filler of its pages until `hand_over`, since copies into them may
        run.
        """
        for page in lease.missing:
            if page in self._waiters:
                self._waiters[page].pop(lease, None)
        lease.missing.clear()

    def hand_over(self, lease: Lease) -> dict[Lease, list[int]]:
        """No copy of `lease`'s transfers runs any more: the oldest waiter of each page that it was to bring becomes
        the filler and must ask
        for it. Returns new filler -> pages."""
        heirs: dict[Lease, list[int]] = {}
        for page in sorted(lease.filling):
            assert self._filler[page] is lease
            heir = min((w for w in self._waiters[page] if w is not lease), key=lambda w: w.order, default=None)
            self._filler[page] = heir
            if heir is not None:
                heir.filling.add(page)
                heirs.setdefault(heir, []).append(page)
        lease.filling.clear()
        return heirs

    def forget(self, pages: Iterable[int]) -> None:
        """Pages that were pruned or freed; nobody may wait for them."""
        for page in pages:
            if page in self._filler:
                assert not self._waiters[page], f"page {page} is dropped while a request waits for it"
                filler = self._filler.pop(page)
                if filler is not None:
                    filler.filling.discard(page)
                del self._waiters[page]
