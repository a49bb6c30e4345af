"""The interface of a side's state machine, whatever its role. Core: no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import RequestCounters, TransferCounters
from kvferry.daemon.core.effects import Effect
from kvferry.daemon.core.pins import Pins


class Core(Protocol):
    """The interface that both roles' state machines have."""

    cache: Cache
    counters: RequestCounters
    pins: Pins

    @property
    def reserved(self) -> int: ...

    @property
    def transfer_counters(self) -> TransferCounters: ...

    @property
    def running(self) -> int: ...

    @property
    def failed_requests(self) -> int:
        """The number of running requests that have failed: they wait for their worker's last word or its proven end."""

    @property
    def waiting_requests(self) -> int: ...

    @property
    def active_transfers(self) -> int: ...

    @property
    def draining_transfers(self) -> int: ...

    def take_effects(self) -> list[Effect]: ...

    def matched_tokens(self, namespace_id: bytes, digests: bytes) -> int: ...

    def worker_lost(self, worker: int, now: float) -> None: ...

    def worker_gone(self, worker: int, now: float) -> None: ...

    def pool_leaves(self, now: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def stood_still(self, seconds: float, now: float) -> None:
        """This daemon stood still for so long, and has not read what came meanwhile: by that alone nobody is late."""

    def copy_ended(self, number: int, failed: Sequence[int], mismatched: int, seconds: float, now: float) -> None: ...
