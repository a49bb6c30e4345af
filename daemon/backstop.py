"""The end of a daemon's process whose orderly end does not come. Shell.

First a thread of Python: it removes the daemon's files, says why, and leaves. It can be kept from that by what hangs:
whoever keeps the interpreter, the lock of a log, a pipe that nobody reads behind stderr. Behind it waits a thread of
C++, which needs none of them. Neither counts the time in which the process stood still, and its end with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from io import FileIO

from kvferry._core import end_process_later
from kvferry.transfer.mapping.segment import owned_files
from kvferry.waiting import slices

log = logging.getLogger(__name__)

LATER_SECONDS = 2.0  # the second after the first
SHOWS = signal.SIGUSR2  # by which the second has it written where all threads stand


def arm(seconds: float, leave: Callable[[int], None], shm_dir: str, incarnation: bytes) -> None:
    """Arms the backstop for good: the interpreter's own end, which waits for threads, may hang, too."""

    def break_off() -> None:
        """Something does not end, as a copy that hangs, and nothing can end it but the process's end."""
        for part in slices(seconds):
            time.sleep(part)
        try:
            for path in owned_files(shm_dir, incarnation):  # the lock stays: more may come meanwhile
                with contextlib.suppress(OSError):
                    os.unlink(path)
            log.critical("the daemon has not ended within %g s; its process ends now, and stands here:", seconds)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        finally:
            leave(1)

    faulthandler.register(SHOWS, file=_never_waits(), all_threads=True)
    end_process_later(round((seconds + LATER_SECONDS) * 1000), SHOWS)
    threading.Thread(target=break_off, name="kvferry-backstop", daemon=True).start()


def _never_waits() -> FileIO:
    """The file that stderr is, opened again so that no write to it waits; nothing, where it cannot be, as a socket."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return open(os.open("/proc/self/fd/2", flags), "wb", buffering=0)
    except OSError:
        return open(os.devnull, "wb", buffering=0)
