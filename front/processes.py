"""Several processes that accept connections of one socket: one Python process has one core.

The first is their parent and serves nobody: it says that they are ready once all are, starts one anew that ends before
its time, and passes SIGTERM on. They end with it, however it ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import time
from collections.abc import Callable

from kvferry.signals import end_signals

PR_SET_PDEATHSIG = 1  # linux/prctl.h
AGAIN_SECONDS = 1.0  # between a process's end and the start of its successor
LATE_SECONDS = 10.0  # behind their grace, after which processes that do not end are killed

_log = logging.getLogger(__name__)

Serve = Callable[[Callable[[], None]], int]
"""Serves until SIGTERM and gives the exit code; it calls what it is given once it is ready."""


class Processes:
    """`count` processes of `serve`, from `run` on. The caller has no threads."""

    def __init__(
        self,
        count: int,
        serve: Serve,
        ready: Callable[[], None],
        stopping: Callable[[], None],
        grace_s: float,
        ended: Callable[[int], None] = lambda pid: None,
    ) -> None:
        """ready: is called when all are, for the first time; stopping: when they are to end; ended: with the id of each
        that has."""
        self._count = count
        self._serve = serve
        self._ready = ready
        self._stopping = stopping
        self._grace_s = grace_s
        self._ended = ended
        self._running: set[int] = set()
        self._due: list[float] = [time.monotonic()] * count  # when those that are missing are started
        self._ready_fd, self._told_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake_fd, self._signal_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping_until: float | None = None
        self._code = 0
        self._ends = end_signals()

    def run(self) -> int:
        """The exit code: 0 where all ended in order after SIGTERM or SIGINT, else that of one that did not."""
        for number in self._ends:
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it wakes `select`
        signal.set_wakeup_fd(self._signal_fd, warn_on_full_buffer=False)
        told = 0
        while self._stopping_until is None or self._running:
            self._start_due()
            readable, _, _ = select.select([self._ready_fd, self._wake_fd], [], [], self._patience())
            if self._wake_fd in readable:
                os.read(self._wake_fd, 4096)
            if self._ready_fd in readable:
                before, told = told, told + len(os.read(self._ready_fd, 4096))
                if before < self._count <= told:
                    self._ready()
            self._reap()
            if self._stopping_until is not None and time.monotonic() > self._stopping_until:
                self._tell(signal.SIGKILL)
        return self._code

    def _stop(self, *_: object) -> None:
        if self._stopping_until is None:
            self._stopping_until = time.monotonic() + self._grace_s + LATE_SECONDS
            self._stopping()
        self._tell(signal.SIGTERM)

    def _tell(self, number: signal.Signals) -> None:
        for pid in self._running:
            os.kill(pid, number)  # one that has ended is there until it is reaped

    def _patience(self) -> float:
        now = time.monotonic()
        if self._stopping_until is not None:
            return max(0.1, self._stopping_until - now)
        return max(0.0, min(self._due) - now) if self._due else 60.0

    def _start_due(self) -> None:
        now = time.monotonic()
        while self._stopping_until is None and self._due and self._due[0] <= now:
            self._due.pop(0)
            parent = os.getpid()
            signal.pthread_sigmask(signal.SIG_BLOCK, self._ends)  # a child hears it once it can
            try:
                pid = os.fork()
                if pid == 0:
                    os._exit(self._child(parent))
                self._running.add(pid)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, self._ends)

    def _child(self, parent: int) -> int:
        """What a child does, and its exit code."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in self._ends:
                signal.signal(number, lambda *_: os._exit(0))  # until it serves
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._ends)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
            if os.getppid() != parent:
                return 1
            return self._serve(self._is_ready)
        except BaseException:
            _log.exception("a process of the front end ends")
            return 1

    def _is_ready(self) -> None:
        os.write(self._told_fd, b"r")

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._running.discard(pid)
            self._ended(pid)
            code = os.waitstatus_to_exitcode(status)
            if self._stopping_until is not None:
                self._code = self._code or abs(code)
                continue
            _log.error("a process of the front end ended by itself (%d); another is started", code)
            self._due.append(time.monotonic() + AGAIN_SECONDS)
