"""The findings of `kvferry doctor`'s checks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, BAD = "ok", "note", "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `level` bad: a daemon with these settings will not start, or not work; note: it could be better."""

    level: str
    what: str
    found: str
    remedy: str = ""
