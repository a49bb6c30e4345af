"""The names of the daemons beside prefill engines, which decode's requests are for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

LOOK_SECONDS = 0.5  # between two questions for a name
MAX_PEERS = 4096  # whose names are kept: requests say where they are asked for

Peer = tuple[str, int]  # the bootstrap server's host:port, and the prefill engine's data-parallel rank


class PeerDaemon(NamedTuple):
    """The daemon beside a prefill engine."""

    name: str  # empty: it is not known yet
    tells_asks: bool = False  # the engine hears what decode has asked for, and computes that first


UNKNOWN = PeerDaemon("")


class PeerNames:
    def __init__(self, ask: Callable[[Callable[[], None]], None], daemon_of: Callable[[str, int], PeerDaemon]) -> None:
        """ask: has a question asked on another thread. daemon_of: asks a bootstrap server."""
        self._ask = ask
        self._daemon_of = daemon_of
        self._daemons: dict[Peer, PeerDaemon] = {}
        self._asking: set[Peer] = set()
        self._again: dict[Peer, float] = {}  # when each may be asked for again
        self._lock = threading.Lock()

    def find(self, address: str, dp_rank: int) -> PeerDaemon:
        """UNKNOWN: it is being asked for."""
        peer = address, dp_rank
        with self._lock:
            found = self._daemons.get(peer, UNKNOWN)
            if not found.name and peer not in self._asking and time.monotonic() >= self._again.get(peer, 0.0):
                self._asking.add(peer)
                self._ask(partial(self._look, peer))
        return found

    def forget(self, address: str, dp_rank: int) -> None:
        """It may have another daemon since."""
        with self._lock:
            self._daemons.pop((address, dp_rank), None)

    def _look(self, peer: Peer) -> None:
        found = UNKNOWN
        try:
            found = self._daemon_of(*peer)
        finally:
            with self._lock:
                self._asking.discard(peer)
                for known in (self._daemons, self._again):
                    if len(known) >= MAX_PEERS:
                        known.clear()
                self._again[peer] = time.monotonic() + LOOK_SECONDS
                if found.name:
                    self._daemons[peer] = found
