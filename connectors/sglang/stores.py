"""Finished requests' pages on their way to the daemon's host tier: what SGLang's radix cache evicts of them later comes
back from there. Until they are copied they stay locked in the radix cache, so that SGLang gives them to nobody.

All of it is called on the scheduler's thread. Ranks of one engine decide alike: locks are let go in the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.connectors.sglang.digests import seed_of
from kvferry.connectors.sglang.radix_locks import LockedPrefix, UnknownTree, locked_prefix
from kvferry.connectors.sglang.transfers import PageTransfer, PollState, StoredPrompt

LOOK_SECONDS = 0.001
MAX_TOLD = 20  # reasons

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Running:
    transfer: PageTransfer
    kept: LockedPrefix


class FinishedPages:
    """`add` what has finished; `tidy` in each step; `settle` before the radix cache is emptied."""

    def __init__(
        self,
        most: float,
        store: Callable[[PageTransfer, list[int]], StoredPrompt],
        hand_in: Callable[[StoredPrompt], None],
        agree: Callable[[list[bool]], list[bool]],
    ) -> None:
        """`most`: pages that may be locked; what finishes beyond stays in the radix cache alone. `agree`: of each
        whether all ranks say so."""
        self._most = most
        self._store = store
        self._hand_in = hand_in
        self._agree = agree
        self._running: list[_Running] = []
        self._told: set[str] = set()

    def add(self, name: Any, request: Any, tokens: Any, tree: Any) -> None:
        """`request` has finished with these tokens, and the tree has what it keeps of them. `name`: of the store."""
        room = self._most - sum(each.transfer.pages for each in self._running)
        try:
            kept = locked_prefix(tree, tokens, _names_beside(request), room)
        except UnknownTree as error:
            self._tell(f"{error} in this version of SGLang")
            return
        except ValueError:
            self._tell(f"with it more than {self._most:.0f} pages would be locked by copies")
            return
        if kept is None:
            return
        page = tree.page_size
        transfer = PageTransfer(name, tokens[: len(kept.slots)], page, seed_of(request), PollState.TRANSFERRING)
        self._running.append(_Running(transfer, kept))
        blocks = (kept.slots[::page] // page).tolist()
        self._hand_in(self._store(transfer, blocks))

    def tidy(self) -> None:
        """Lets go of what is copied, or failed to be: the daemon touches its pages no more."""
        if not self._running:
            return
        over = self._agree([each.transfer.over for each in self._running])
        for each, is_over in zip(self._running, over, strict=True):
            if is_over:
                each.kept.let_go()
                if each.transfer.reason:
                    self._tell(each.transfer.reason)
        self._running = [each for each, is_over in zip(self._running, over, strict=True) if not is_over]

    def settle(self, seconds: float) -> bool:
        """Waits until nothing runs. False: something does, on some rank, and SGLang must not empty its radix cache."""
        end = time.monotonic() + seconds
        while True:
            self.tidy()
            if not self._running:
                return True
            if all(self._agree([time.monotonic() >= end])):
                return False
            time.sleep(LOOK_SECONDS)

    def _tell(self, why: str) -> None:
        """Says once why something that has finished is not in the host tier."""
        if why not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(why)
            _log.warning("a finished request's pages are not kept in the host tier: %s", why)


def _names_beside(request: Any) -> dict[str, Any]:
    """What SGLang's key has beside the tokens."""
    beside = {"extra_key": request.extra_key}
    if (salt := getattr(request, "cache_salt", None)) is not None:
        beside["cache_salt"] = salt
    return beside
