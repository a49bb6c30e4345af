"""The end of a daemon's process whose orderly end does not come. Shell.

First a thread of Python: it removes the daemon's files, says why, and leaves. It can be kept from that by what hangs:
whoever keeps the interpreter, the lock of a log, a pipe that nobody reads behind stderr. Behind it waits a thread of C,
which needs none of them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable
from io import FileIO

from kvferry.transfer.segment import owned_files

log = logging.getLogger(__name__)

LATER_SECONDS = 2.0  # the second after the first


def arm(seconds: float, leave: Callable[[int], None], shm_dir: str, incarnation: bytes) -> None:
    """For good: the interpreter's own end, which waits for threads, may hang, too. It is what disarms both."""

    def break_off() -> None:
        """Something does not end, as a copy that hangs, and nothing can end it but the process's end."""
        try:
            for path in owned_files(shm_dir, incarnation):  # the lock stays: more may come meanwhile
                with contextlib.suppress(OSError):
                    os.unlink(path)
            log.critical("the daemon has not ended within %g s; its process ends now, and stands here:", seconds)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        finally:
            leave(1)

    faulthandler.dump_traceback_later(seconds + LATER_SECONDS, exit=True, file=_never_waits())
    first = threading.Timer(seconds, break_off)
    first.daemon = True
    first.start()


def _never_waits() -> FileIO:
    """What stderr is, opened again so that no write to it waits; nothing, where it cannot be, as a socket."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return open(os.open("/proc/self/fd/2", flags), "wb", buffering=0)
    except OSError:
        return open(os.devnull, "wb", buffering=0)
