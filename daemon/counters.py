"""Running totals and recent windows of one side. Core: clock values are passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RECENT = 1000


@dataclass(slots=True)
class RequestCounters:
    admitted: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0  # of them, from the host tier
    retracted: int = 0
    overtaken: int = 0
    saved_pages: int = 0
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT))  # (queried, hit)

    def lookup(self, queried: int, hit: int, host_hit: int = 0) -> None:
        self.admitted += 1
        self.queried_tokens += queried
        self.hit_tokens += hit
        self.host_hit_tokens += host_hit
        self.recent.append((queried, hit))

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def recent_hit_rate(self) -> float:
        queried = sum(q for q, _ in self.recent)
        return sum(h for _, h in self.recent) / queried if queried else 0.0


@dataclass(slots=True)
class TransferCounters:
    """Of one side: `opened` = active + completed + failed + aborted. Bytes and parts are those over NIXL."""

    opened: int = 0
    completed: int = 0
    failed: int = 0
    aborted: int = 0
    pages: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    parts: int = 0
    dropped_parts: int = 0


@dataclass(slots=True)
class Latencies:
    """Seconds of the last RECENT events, whole and by stage."""

    count: int = 0
    values: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    stages: dict[str, deque[float]] = field(default_factory=dict)

    def add(self, seconds: float, stages: dict[str, float]) -> None:
        self.count += 1
        self.values.append(seconds)
        for stage, value in stages.items():
            self.add_stage(stage, value)

    def add_stage(self, stage: str, seconds: float) -> None:
        """One stage alone, which an event may have several times or not at all."""
        self.stages.setdefault(stage, deque(maxlen=RECENT)).append(seconds)

    def quantile(self, q: float) -> float:
        """Nearest-rank quantile in seconds; 0 with no events."""
        if not self.values:
            return 0.0
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
