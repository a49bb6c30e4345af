"""The names of the daemons beside prefill engines, which decode's requests are for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

LOOK_SECONDS = 0.5  # between two questions for a name
MAX_PEERS = 4096  # whose names are kept: requests say where they are asked for

Peer = tuple[str, int]  # the bootstrap server's host:port, and the prefill engine's data-parallel rank


class PeerNames:
    def __init__(self, ask: Callable[[Callable[[], None]], None], name_of: Callable[[str, int], str]) -> None:
        """ask: has a question asked on another thread. name_of: asks a bootstrap server; empty: it does not know."""
        self._ask = ask
        self._name_of = name_of
        self._names: dict[Peer, str] = {}
        self._asking: set[Peer] = set()
        self._again: dict[Peer, float] = {}  # when each may be asked for again
        self._lock = threading.Lock()

    def find(self, address: str, dp_rank: int) -> str:
        """The name; empty: it is not known yet, and is being asked for."""
        peer = address, dp_rank
        with self._lock:
            name = self._names.get(peer, "")
            if not name and peer not in self._asking and time.monotonic() >= self._again.get(peer, 0.0):
                self._asking.add(peer)
                self._ask(partial(self._look, peer))
        return name

    def forget(self, address: str, dp_rank: int) -> None:
        """It may have another daemon since."""
        with self._lock:
            self._names.pop((address, dp_rank), None)

    def _look(self, peer: Peer) -> None:
        name = ""
        try:
            name = self._name_of(*peer)
        finally:
            with self._lock:
                self._asking.discard(peer)
                for known in (self._names, self._again):
                    if len(known) >= MAX_PEERS:
                        known.clear()
                self._again[peer] = time.monotonic() + LOOK_SECONDS
                if name:
                    self._names[peer] = name
