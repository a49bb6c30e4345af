"""The parts of the daemon that move, and those that are stalled. Core: no I/O, time is passed in.

A part is what does work in a place of its own: the event loop, a copy worker, a courier's poller. Each ticks while it
moves; one that has not for `stalled_seconds` is stalled, and the daemon serves no longer, whatever else it says.
"""

from __future__ import annotations


class Progress:
    def __init__(self, stalled_seconds: float) -> None:
        self.stalled_seconds = stalled_seconds
        self._ticked: dict[str, float] = {}  # when, by part

    def tick(self, part: str, now: float) -> None:
        """Notes that the part moved; one that is new begins so."""
        self._ticked[part] = now

    def keep(self, parts: set[str]) -> None:
        """Forgets all parts but these: the others have ended, and may not be missed."""
        self._ticked = {part: when for part, when in self._ticked.items() if part in parts}

    def known(self, part: str) -> bool:
        return part in self._ticked

    def stalled(self, now: float) -> list[tuple[str, float]]:
        """(part, seconds without a tick), longest first."""
        late = [(part, now - when) for part, when in self._ticked.items() if now - when > self.stalled_seconds]
        return sorted(late, key=lambda entry: -entry[1])
