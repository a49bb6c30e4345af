"""The choice between fetching pages and computing them, and what it is made by: the engine's speed, the sessions'
rates. Core: no I/O, time is passed in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial

OFF, AUTO, ALWAYS = "off", "auto", "always"

PATIENCE = 0.03  # of the estimate of computing: so long an Ask is waited for
SPARE = 0.75  # of the time for which the engine computes others: a wait in it costs nothing
MARGIN = 2.0  # by which fetching must be faster
LEAST_TOKENS = 256  # that are worth a round trip
MOST_TIMES = 4.0  # its own estimate: so long a fetch may take,
LEAST_SHARE = 0.25  # or such a share of the estimate of computing: the first ones know no rate, and a host may stutter
FORCED_SECONDS = 1.0  # with ALWAYS: for the Ask at most
LEAST_SECONDS, MOST_SECONDS = 5.0, 60.0  # with ALWAYS: for a fetch, however loaded its host, or slow its session was
TOKENS_PER_SECOND = 10_000.0  # of an engine of which nothing was measured
BYTES_PER_SECOND = 50e9  # of a session, likewise: fast enough for a first fetch, which tells, and has little time
ROUND_TRIP_SECONDS = 0.002  # in every estimate of a fetch
RATE_SECONDS = 60.0  # a rate is believed for so long,
SLOW_TIMES = 16  # and one that is too slow so often: a session's first fetch may be, and little time is lost
WINDOW_SECONDS = 10.0  # of computing, in which what was measured before loses half of its weight,
RATE_WINDOW_SECONDS = 0.5  # and of fetching

# What is decided about a prompt of which pages are lacking: fetched, in time or not, or computed and why.
FETCH = "fetched"
NO_ASK = "no_ask"  # none came in time
NOT_HELD = "not_held"  # decode lacks them, too
FEW = "too_few"  # tokens
SLOW = "too_slow"  # a fetch would take longer
NO_SESSION = "no_way_back"  # in the session by which it is asked
NO_PAGES = "no_pages"  # of its own to fetch into, in the time that its engine would wait


@dataclass(frozen=True, slots=True)
class WayBackLimits:
    """setting: OFF, AUTO or ALWAYS. page_bytes: of a page over all ranks."""

    setting: str = OFF
    page_bytes: int = 0
    closed_namespaces: frozenset[bytes] = frozenset()  # of which no other decode daemon is asked

    @property
    def least_tokens(self) -> int:
        """The tokens of a prompt that must be lacking for anything to be fetched; 0: nothing ever is."""
        return {OFF: 0, AUTO: LEAST_TOKENS, ALWAYS: 1}[self.setting]


NO_WAY_BACK = WayBackLimits()


class Throughput:
    """What is done of something, an engine's tokens or a session's bytes, in a second in which there is any to do.
    assumed: before anything is measured; window: seconds in which what was measured before loses half of its weight;
    lag: seconds before the first of it is done, which do not count; half of what passes until then does in any case.
    """

    def __init__(self, assumed: float, window: float, lag: float = 0.0) -> None:
        self._assumed = assumed
        self._window = window
        self._lag = lag
        self._lags = False  # there was nothing to do before, and nothing is done yet
        self._left: dict[Hashable, int] = {}  # of each request that has begun
        self._done = 0.0
        self._seconds = 0.0
        self._since = 0.0  # the last time that something was counted, while there is something to do

    def begins(self, request: Hashable, amount: int, now: float) -> None:
        if not self._left:
            self._since, self._lags = now, True
        self._left[request] = amount

    def progress(self, request: Hashable, amount: int, now: float) -> None:
        """So much more of it is done."""
        if request in self._left:
            self._left[request] = max(0, self._left[request] - amount)
        passed = max(0.0, now - self._since)
        self._done += amount
        self._seconds += passed - min(self._lag, passed / 2) if self._lags else passed
        self._since, self._lags = now, False
        if self._seconds > self._window:
            self._done, self._seconds = self._done / 2, self._seconds / 2

    def ends(self, request: Hashable) -> None:
        """Idempotent."""
        self._left.pop(request, None)

    @property
    def idle(self) -> bool:
        """Nothing has begun that has not ended."""
        return not self._left

    @property
    def seconds_left(self) -> float:
        """The estimate of what has begun."""
        return sum(self._left.values()) / self.per_second

    @property
    def per_second(self) -> float:
        if self._done <= 0 or self._seconds <= 0:
            return self._assumed
        return self._done / self._seconds


_brings = partial(Throughput, BYTES_PER_SECOND, RATE_WINDOW_SECONDS, ROUND_TRIP_SECONDS)


@dataclass(slots=True)
class _Session:
    brings: Throughput = field(default_factory=_brings)
    at: float = 0.0  # of its last fetch's end
    refused: int = 0  # prompts since then, or since one was tried all the same, for which it is too slow


class SessionRates:
    """The bytes a second that sessions bring, however many fetches share one."""

    def __init__(self) -> None:
        self._sessions: dict[int, _Session] = {}

    def begins(self, session: int, fetch: int, nbytes: int, now: float) -> None:
        self._of(session, now).brings.begins(fetch, nbytes, now)

    def progress(self, session: int, fetch: int, nbytes: int, now: float) -> None:
        self._of(session, now).brings.progress(fetch, nbytes, now)

    def ends(self, session: int, fetch: int, now: float) -> None:
        of = self._of(session, now)
        of.at, of.refused = now, 0
        of.brings.ends(fetch)

    def seconds(self, session: int, nbytes: int, now: float) -> float:
        """The estimate of so many bytes more, behind what is on its way."""
        of = self._of(session, now).brings
        return ROUND_TRIP_SECONDS + of.seconds_left + nbytes / of.per_second

    def too_slow(self, session: int, now: float) -> bool:
        """Whether one that is too slow for a prompt is not tried all the same; the prompt is counted."""
        of = self._of(session, now)
        of.refused = (of.refused + 1) % (SLOW_TIMES + 1)
        return of.refused > 0

    def _of(self, session: int, now: float) -> _Session:
        of = self._sessions.get(session)
        if of is None or (of.brings.idle and now - of.at > RATE_SECONDS):
            of = self._sessions[session] = _Session(at=now)
        return of

    def forget(self, session: int) -> None:
        self._sessions.pop(session, None)


@dataclass(frozen=True, slots=True)
class Choice:
    """seconds: that a fetch may take; 0: the pages are computed."""

    why: str
    seconds: float = 0.0


@dataclass(slots=True)
class Judge:
    """The choices of one prefill daemon, with what they are made by."""

    limits: WayBackLimits
    page_size: int
    speed: Throughput = field(default_factory=partial(Throughput, TOKENS_PER_SECOND, WINDOW_SECONDS))
    rates: SessionRates = field(default_factory=SessionRates)
    choices: Counter[str] = field(default_factory=Counter)
    compute_seconds: float = 0.0  # estimates of the last choice
    fetch_seconds: float = 0.0

    def patience(self, tokens: int) -> float:
        """Seconds from Begin on for which an Ask is waited for where so many tokens are to be computed; pages are, too,
        by an engine that could compute without them."""
        if self.limits.setting == ALWAYS:
            return FORCED_SECONDS
        return PATIENCE * tokens / self.speed.per_second

    def more_patience(self, tokens: int, waited: float) -> float:
        """Seconds for which a prompt that has waited so long may wait on for its Ask, since its engine computes others
        meanwhile; no longer in all than its own tokens take, and 0 where that is little."""
        spare = min(SPARE * self.speed.seconds_left, tokens / self.speed.per_second - waited)
        return spare if self.limits.setting == AUTO and spare > self.patience(tokens) else 0.0

    def worth(self, session: int, pages: int, now: float) -> bool:
        """Whether so many pages would be fetched if the session's decode daemon held them."""
        if self.limits.setting == ALWAYS:
            return True
        tokens = pages * self.page_size
        return tokens >= LEAST_TOKENS and MARGIN * self._fetch_estimate(session, pages, now) <= self._compute(tokens)

    def seconds(self, session: int, fetched: int, computed: int, now: float) -> float:
        """The estimate of fetching so many pages from the session and computing so many behind them."""
        compute = computed * self.page_size / self.speed.per_second
        return self._fetch_estimate(session, fetched, now) + compute

    def worth_waiting(self, pages: int, seconds: float) -> bool:
        """Whether so many pages that come for another prompt are worth a wait of so long."""
        return self.limits.setting == ALWAYS or seconds <= self._compute(pages * self.page_size)

    def _fetch_estimate(self, session: int, pages: int, now: float) -> float:
        return self.rates.seconds(session, pages * self.limits.page_bytes, now)

    def _compute(self, tokens: int) -> float:
        """The estimate of computing so many, behind what has begun."""
        return self.speed.seconds_left + tokens / self.speed.per_second

    def choose(self, session: int, pages: int, now: float, gained: int | None = None) -> Choice:
        """The choice for so many pages that the session's decode daemon holds. `gained`: of them, those that need not
        be computed then, at least one; the engine holds the others itself. None: all."""
        tokens = (pages if gained is None else gained) * self.page_size
        self.compute_seconds = self._compute(tokens)
        self.fetch_seconds = self._fetch_estimate(session, pages, now)
        if self.limits.setting == ALWAYS:
            seconds = max(LEAST_SECONDS, MOST_TIMES * self.fetch_seconds)
            return self.count(Choice(FETCH, min(seconds, MOST_SECONDS)))
        if tokens < LEAST_TOKENS:
            return self.count(Choice(FEW))
        if MARGIN * self.fetch_seconds > self.compute_seconds and self.rates.too_slow(session, now):
            return self.count(Choice(SLOW))
        patient = max(MOST_TIMES * self.fetch_seconds, LEAST_SHARE * tokens / self.speed.per_second)
        return self.count(Choice(FETCH, min(self.compute_seconds, patient)))

    def count(self, choice: Choice) -> Choice:
        assert choice.seconds >= 0 and math.isfinite(choice.seconds)
        self.choices[choice.why] += 1
        return choice
