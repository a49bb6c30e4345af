"""The signals that end a process of kvferry in order."""

from __future__ import annotations

import signal


def end_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP, which a terminal sends when it closes; not where it is ignored, as nohup has it."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if kept else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
