"""Prompts that wait for a decode daemon's Ask, and how long. Core: no I/O, time is passed in."""

from __future__ import annotations

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.effects import Outbox, WakeAt
from kvferry.daemon.core.prefill_entry import BegunPrompt, Entry
from kvferry.daemon.core.way_back.choice import Judge


class AskWaits:
    """Those that wait, each for a small share of what it takes to compute, and on while its engine computes others."""

    def __init__(self, cache: Cache, judge: Judge, outbox: Outbox) -> None:
        self._cache = cache
        self._judge = judge
        self._outbox = outbox
        self._until: dict[Entry, float] = {}

    def lacking(self, prompt: BegunPrompt) -> int:
        """Tokens that its engine is to compute as it is."""
        return prompt.tokens - max(prompt.hold.matched, prompt.engine_held) * self._cache.page_size

    def first(self, prompt: BegunPrompt) -> float:
        """Until when it waits whatever its engine does."""
        return prompt.begun_at + self._judge.patience(self.lacking(prompt))

    def until(self, prompt: BegunPrompt) -> float:
        """Until when it waits, as things are now; not later than now: it has waited long enough."""
        now, first = self._cache.clock.now, self.first(prompt)
        return first if first > now else now + self._judge.more_patience(self.lacking(prompt), now - prompt.begun_at)

    def wait(self, entry: Entry, until: float) -> None:
        self._until[entry] = until
        self._outbox.put(WakeAt(until))

    def ends(self, entry: Entry) -> bool:
        """Whether it waited until now. Idempotent."""
        return self._until.pop(entry, None) is not None

    def next_over(self) -> Entry | None:
        """One that has waited long enough, and waits no more: once it has begun, others may wait on for its sake."""
        now = self._cache.clock.now
        for entry, until in list(self._until.items()):
            assert entry.prompt is not None
            if until > now and (self._judge.speed.seconds_left or self.first(entry.prompt) > now):
                continue
            if (later := self.until(entry.prompt)) <= now:
                del self._until[entry]
                return entry
            self.wait(entry, later)
        return None

    def engine_idle(self) -> None:
        """Nobody waits on for its sake."""
        if self._until:
            self._outbox.put(WakeAt(self._cache.clock.now))
