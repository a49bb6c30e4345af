"""What sessions have brought."""

from __future__ import annotations

from kvferry.daemon.core.way_back.choice import ROUND_TRIP_SECONDS, SessionRates


def measured(rates: SessionRates, session: int, nbytes: int, seconds: float, now: float) -> None:
    """A fetch has brought so many bytes, its round trip not counted."""
    rates.begins(session, 9, nbytes, now - seconds - ROUND_TRIP_SECONDS)
    rates.progress(session, 9, nbytes, now)
    rates.ends(session, 9, now)
