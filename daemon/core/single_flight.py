"""Single flight: who brings each page that is on its way, and who waits for it. Core: no I/O.

An arriving page is brought by one request (its filler) or by a restore from the host tier, and may be waited for by
others that matched it. When the filler goes, or the restore fails, the oldest waiter that can ask for it takes over;
with none the page has no filler until a new admission matches it or its path is pruned.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final, Generic, Protocol, TypeVar, cast


class Waiter(Hashable, Protocol):
    missing: set[int]  # page ids that it waits for
    filling: set[int]  # page ids that its transfers bring, its own or others'

    @property
    def order(self) -> int:
        """The waiter's order; grows with each request."""

    @property
    def can_ask(self) -> bool:
        """Whether there is somebody whom it can ask for pages."""


WaiterT = TypeVar("WaiterT", bound=Waiter)


class _Restore:
    """Stands for a copy from the host tier as the filler."""


RESTORE: Final = _Restore()


class Arrivals(Generic[WaiterT]):
    def __init__(self) -> None:
        self._filler: dict[int, WaiterT | _Restore | None] = {}
        # In order of admission. A filler waits for what is in its `missing`, and is here only if it came second.
        self._followers: dict[int, dict[WaiterT, None]] = {}

    def __len__(self) -> int:
        return len(self._filler)

    def __contains__(self, page: int) -> bool:
        return page in self._filler

    def expect(self, page: int, filler: WaiterT) -> None:
        """Expects `page`, which is new and brought by `filler`, which waits for it."""
        assert page not in self._filler, f"page {page} is already arriving"
        self._filler[page] = filler
        filler.filling.add(page)
        filler.missing.add(page)

    def restoring(self, pages: Iterable[int]) -> None:
        """A copy brings them; who waits for them follows."""
        for page in pages:
            assert page not in self._filler, f"page {page} is already arriving"
            self._filler[page] = RESTORE

    def follow(self, page: int, waiter: WaiterT) -> bool:
        """`waiter` waits for an arriving page. True: nobody brings it, so it has become the filler and must ask."""
        filler = self._filler[page]
        self._followers.setdefault(page, {})[waiter] = None
        waiter.missing.add(page)
        if filler is None:
            assert waiter.can_ask, f"page {page} is brought by nobody, and its only waiter cannot ask"
            self._filler[page] = waiter
            waiter.filling.add(page)
            return True
        return False

    def of(self, pages: Iterable[int]) -> list[int]:
        """Those of these pages that are on their way."""
        return [*filter(self._filler.__contains__, pages)]

    def arrived(self, pages: Sequence[int]) -> list[WaiterT]:
        """The pages are readable: forgets them and returns those that waited for one of them, the oldest first."""
        # Hundreds of pages come at once, at every part: no statement is for one of them.
        waiters: dict[WaiterT, None] = {}
        for filler in dict.fromkeys(map(self._filler.pop, pages)):
            if filler is not None and filler is not RESTORE:
                one = cast(WaiterT, filler)
                one.filling.difference_update(pages)
                if not one.missing.isdisjoint(pages):
                    waiters[one] = None
        for page in self._followers.keys() & pages:
            waiters.update(self._followers.pop(page))
        for waiter in waiters:
            waiter.missing.difference_update(pages)
        return sorted(waiters, key=lambda waiter: waiter.order)

    def leave(self, waiter: WaiterT) -> None:
        """Takes out a waiter that waits no more. It stays the filler of its pages until `hand_over`, since they may
        still be written."""
        for page in self._followers.keys() & waiter.missing:
            self._followers[page].pop(waiter, None)
            if not self._followers[page]:
                del self._followers[page]
        waiter.missing.clear()

    def hand_over(self, waiter: WaiterT) -> dict[WaiterT, list[int]]:
        """No copy of its transfers runs any more: others take over what it was to bring. Returns new filler -> pages to
        ask for.
        """
        pages = sorted(waiter.filling)
        waiter.filling.clear()
        for page in pages:
            assert self._filler[page] is waiter
        return self._pass_on(pages, waiter)

    def take_over(self, pages: Iterable[int], old: WaiterT, new: WaiterT) -> None:
        """Lets `new`, which waits for these pages, bring them in place of `old`, no copy of which runs into them any
        more and which goes on waiting for them.
        """
        for page in pages:
            assert self._filler[page] is old and page in new.missing, f"page {page} cannot be taken over"
            self._filler[page] = new
            old.filling.discard(page)
            new.filling.add(page)
            self._followers[page][old] = None

    def followers(self, page: int) -> Iterable[WaiterT]:
        """Those who wait for this arriving page that another brings, in order of admission but for who brought it
        before."""
        return self._followers.get(page, ())

    def lost(self, pages: Iterable[int]) -> tuple[dict[WaiterT, list[int]], list[WaiterT]]:
        """Passes on pages whose restore failed. Returns new filler -> pages to ask for, and the waiters that cannot
        ask, which wait no more and must be looked at again.
        """
        lost = list(pages)
        stranded = {w: None for page in lost for w in self._followers.get(page, ()) if not w.can_ask}
        for waiter in stranded:
            self.leave(waiter)
        return self._pass_on(lost, None), list(stranded)

    def abandoned(self, path: Sequence[int]) -> int | None:
        """Index of the first page of the path that is on its way and brought by nobody."""
        filler = self._filler
        if not filler:
            return None
        return next((i for i, page in enumerate(path) if page in filler and filler[page] is None), None)

    def forget(self, pages: Iterable[int]) -> None:
        """Forgets pages that were pruned or freed; nobody may wait for them."""
        for page in pages:
            if page in self._filler:
                filler = self._filler.pop(page)
                waited_for = page in self._followers
                if filler is not None and filler is not RESTORE:
                    left = cast(WaiterT, filler)
                    waited_for = waited_for or page in left.missing
                    left.filling.discard(page)
                assert not waited_for, f"page {page} is dropped while a request waits for it"

    def _pass_on(self, pages: Iterable[int], old: WaiterT | None) -> dict[WaiterT, list[int]]:
        heirs: dict[WaiterT, list[int]] = {}
        for page in pages:
            asking = (w for w in self._followers.get(page, ()) if w is not old and w.can_ask)
            heir = min(asking, key=lambda w: w.order, default=None)
            self._filler[page] = heir
            if heir is not None:
                heir.filling.add(page)
                heirs.setdefault(heir, []).append(page)
        return heirs
