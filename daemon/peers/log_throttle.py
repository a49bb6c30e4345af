"""A memory of what a log has said lately, so that a daemon that tries again and again does not repeat it each time.
Pure."""

from __future__ import annotations

import re

REPEAT_SECONDS = 60.0
MOST = 64  # texts that are remembered

_PORT = re.compile(r"\b(ipv[46]:\S*):\d+")  # as gRPC names a caller: its port is another one each time


class Said:
    """A memory of texts that were said. `due`: whether a text is to be said now: when it is new, then at most once in
    REPEAT_SECONDS."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}  # oldest first

    def due(self, text: str, now: float) -> bool:
        key = _PORT.sub(r"\1", text)
        if (before := self._at.get(key)) is not None and now - before < REPEAT_SECONDS:
            return False
        self._at.pop(key, None)
        while len(self._at) >= MOST:
            del self._at[next(iter(self._at))]
        self._at[key] = now
        return True

    def forget(self) -> None:
        self._at.clear()
