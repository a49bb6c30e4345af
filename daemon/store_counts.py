"""What a store counts. Core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlushCount:
    """Pages: freed of each tier, and left because something holds them."""

    device: int
    host: int
    skipped: int


@dataclass(slots=True)
class TierCounters:
    """Pages, ever."""

    spilled: int = 0
    restored: int = 0
    backed_up: int = 0
    spill_failed: int = 0
    restore_failed: int = 0
    mismatched: int = 0
    dropped: int = 0
    host_evicted: int = 0
    spill_seconds: float = 0.0
    restore_seconds: float = 0.0
    recovered: int = 0
    discarded_entries: int = 0
