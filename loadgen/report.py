"""A run's numbers. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from kvferry.loadgen.daemon_stats import DaemonCounts
from kvferry.loadgen.runner import RunRecord, TurnRecord

MAX_ERRORS = 20  # kinds of errors that are listed


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, deviation and percentiles of some values; all zeros where there are none."""

    count: int
    mean: float
    std: float
    min: float
    p25: float
    p50: float
    p75: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ErrorCount:
    message: str
    count: int


@dataclass(frozen=True, slots=True)
class Target:
    """Bounds that a request must keep to be counted as good, in milliseconds; None: no bound."""

    ttft_ms: float | None = None
    inter_token_ms: float | None = None  # the mean of the request's
    latency_ms: float | None = None

    def met(self, turn: TurnRecord) -> bool:
        values = (
            (self.ttft_ms, turn.first_s),
            (self.inter_token_ms, turn.token_s),
            (self.latency_ms, turn.latency_s),
        )
        return all(bound is None or value is None or value * 1000 <= bound for bound, value in values)


@dataclass(frozen=True, slots=True)
class Goodput:
    target: Target
    requests: int  # that met it
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class RunSetup:
    """The set-up of a run."""

    url: str
    model: str
    workload: str
    loop: str
    seed: int
    began: str  # UTC
    warm_up_requests: int  # before the measured ones; in none of the numbers


@dataclass(frozen=True, slots=True)
class Report:
    setup: RunSetup | None
    duration_s: float
    requests: int  # sent
    failed: int
    skipped: int  # never sent: an earlier turn of their conversation failed, or they were meant to start after the time
    requests_per_s: float  # that did not fail
    output_tokens_per_s: float
    tokens_per_s: float  # input and output
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # matched, by the replies' usage
    ttft_ms: Summary
    inter_token_ms: Summary  # between parts of a reply
    token_ms: Summary  # of each request, the mean time of an output token behind the first
    latency_ms: Summary
    late_ms: Summary  # from the intended start to the sending, included in the latencies
    input_tokens: Summary
    output_tokens_each: Summary
    turns: Summary  # answered, of a conversation
    ttft_by_turn_ms: tuple[Summary, ...]
    goodput: Goodput | None
    daemons: DaemonCounts | None  # None: not asked, or `daemons_missing`
    errors: tuple[ErrorCount, ...]
    daemons_missing: str | None = None  # why there are no statistics, though they were asked for

    @property
    def ok(self) -> bool:
        return self.failed == 0 and self.requests > 0

    def json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def distribution(values: Iterable[float], scale: float = 1000.0) -> Summary:
    """The summary of the values times `scale`; by default of seconds in milliseconds."""
    array = np.fromiter(values, dtype=np.float64) * scale
    if not len(array):
        return Summary(0, *(0.0,) * 9)
    p25, p50, p75, p90, p99 = (float(p) for p in np.percentile(array, (25, 50, 75, 90, 99)))
    std = float(array.std(ddof=1)) if len(array) > 1 else 0.0
    low, high = float(array.min()), float(array.max())
    return Summary(len(array), float(array.mean()), std, low, p25, p50, p75, p90, p99, high)


def make_report(
    record: RunRecord,
    daemons: DaemonCounts | None,
    *,
    setup: RunSetup | None = None,
    target: Target | None = None,
    daemons_missing: str | None = None,
) -> Report:
    good = [turn for turn in record.turns if turn.error is None]
    errors = Counter(turn.error for turn in record.turns if turn.error is not None)
    output_tokens = sum(turn.output_tokens for turn in good)
    prompt_tokens = sum(turn.prompt_tokens for turn in good)
    return Report(
        setup=setup,
        duration_s=record.duration_s,
        requests=len(record.turns),
        failed=len(record.turns) - len(good),
        skipped=record.skipped,
        requests_per_s=len(good) / record.duration_s,
        output_tokens_per_s=output_tokens / record.duration_s,
        tokens_per_s=(prompt_tokens + output_tokens) / record.duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(turn.cached_tokens for turn in good),
        ttft_ms=distribution(turn.first_s for turn in good if turn.first_s is not None),
        inter_token_ms=distribution(gap for turn in good for gap in turn.gaps_s),
        token_ms=distribution(turn.token_s for turn in good if turn.token_s is not None),
        latency_ms=distribution(turn.latency_s for turn in good),
        late_ms=distribution(turn.late_s for turn in good),
        input_tokens=distribution((turn.prompt_tokens for turn in good), 1),
        output_tokens_each=distribution((turn.output_tokens for turn in good), 1),
        turns=distribution(Counter(turn.conversation for turn in good).values(), 1),
        ttft_by_turn_ms=_by_turn(good),
        goodput=None if target is None else _goodput(good, target, record.duration_s),
        daemons=daemons,
        errors=tuple(ErrorCount(message, count) for message, count in errors.most_common(MAX_ERRORS)),
        daemons_missing=daemons_missing,
    )


def _by_turn(good: Sequence[TurnRecord]) -> tuple[Summary, ...]:
    turns = 1 + max((turn.turn for turn in good), default=-1)
    firsts: list[list[float]] = [[] for _ in range(turns)]
    for turn in good:
        if turn.first_s is not None:
            firsts[turn.turn].append(turn.first_s)
    return tuple(map(distribution, firsts))


def _goodput(good: Sequence[TurnRecord], target: Target, duration_s: float) -> Goodput:
    met = sum(target.met(turn) for turn in good)
    return Goodput(target, met, met / duration_s)
