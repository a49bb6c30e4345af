"""Running totals and recent windows of one side. Core: clock values are passed in."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field

from kvferry.proto import common_pb2 as common

RECENT = 1000
# Upper bounds of a histogram's buckets, in seconds: from a step of the core to a request's longest deadline.
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def reason_of(code: common.ErrorCode) -> str:
    """An error code as a counter's key: one of a fixed few words, whatever came over the wire."""
    return common.ErrorCode.Name(code).removeprefix("ERROR_").lower()


@dataclass(slots=True)
class Histogram:
    """Seconds of all events ever. counts[i]: at most BOUNDS[i]; the last: above all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds


@dataclass(slots=True)
class LookUpCounters:
    """Counts of what prefill daemons ask decode daemons for, ever."""

    found: int = 0  # a page or more
    nothing: int = 0
    late: int = 0  # no answer came in time
    pages: int = 0  # found

    def heard(self, pages: int) -> None:
        """An answer."""
        self.pages += pages
        self.found += pages > 0
        self.nothing += pages == 0


@dataclass(slots=True)
class TierCounters:
    """Counts of pages between the tiers, ever."""

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
    unstored: Counter[str] = field(default_factory=Counter)  # pages of an engine's blocks; the reasons are a fixed few


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
    failures: Counter[str] = field(default_factory=Counter)  # of the failed ones, by `reason_of` their error
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT))  # (queried, hit)

    def fail(self, code: common.ErrorCode) -> None:
        self.failed += 1
        self.failures[reason_of(code)] += 1

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
    """Counts of one side's transfers: `opened` = active + completed + failed + aborted. Bytes and parts are those over
    NIXL."""

    opened: int = 0
    completed: int = 0
    failed: int = 0
    aborted: int = 0
    pages: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    copied_bytes: int = 0  # between pages and slots: gathered, or scattered
    parts: int = 0
    dropped_parts: int = 0
    stale_notifications: int = 0
    mismatched_parts: int = 0  # received, with a wrong checksum
    failures: Counter[str] = field(default_factory=Counter)  # of the failed ones; the reasons are a fixed few
    aborts: Counter[str] = field(default_factory=Counter)  # of the aborted ones, likewise

    def fail(self, reason: str) -> None:
        self.failed += 1
        self.failures[reason] += 1

    def abort(self, reason: str) -> None:
        self.aborted += 1
        self.aborts[reason] += 1


@dataclass(slots=True)
class Latencies:
    """Seconds, whole and by stage: of the last RECENT events each value, of all of them a histogram."""

    count: int = 0
    whole: Histogram = field(default_factory=Histogram)
    values: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    stages: dict[str, deque[float]] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)  # of the stages

    def add(self, seconds: float, stages: dict[str, float]) -> None:
        self.count += 1
        self.values.append(seconds)
        self.whole.add(seconds)
        for stage, value in stages.items():
            self.add_stage(stage, value)

    def add_stage(self, stage: str, seconds: float) -> None:
        """One stage alone, which an event may have several times or not at all."""
        if stage not in self.stages:  # several times a part: nothing is made in vain
            self.stages[stage], self.histograms[stage] = deque(maxlen=RECENT), Histogram()
        self.stages[stage].append(seconds)
        self.histograms[stage].add(seconds)

    def quantile(self, q: float) -> float:
        """Nearest-rank quantile in seconds; 0 with no events."""
        if not self.values:
            return 0.0
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
