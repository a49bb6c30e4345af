"""The whole system as processes of this machine: daemons, workers, front end, each with its `ready:` line.

Used by the demo, tests and benches.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

START_SECONDS = 120.0
STOP_SECONDS = 40.0


class StackError(RuntimeError):
    """A process did not come up, or ended when it should not have; the message ends with what it last said."""


@dataclass(eq=False)
class Process:
    """One `kvferry` process; its output goes to a log file, but for the ready lines."""

    name: str
    popen: subprocess.Popen[str]
    log_path: str
    addresses: queue.Queue[str] = field(default_factory=queue.Queue)
    reader: threading.Thread | None = None

    def tail(self, lines: int = 15) -> str:
        with open(self.log_path, errors="replace") as log:
            return "".join(log.readlines()[-lines:])


class Stack:
    """A context: what it started is ended with it, newest first, and its folder removed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-")
        self.processes: list[Process] = []

    @property
    def folder(self) -> str:
        return self._folder.name

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(
        self,
        name: str,
        words: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Process:
        """Starts `kvferry WORDS` in a process of its own; `prefix` is a command that runs another one, like `nice`."""
        log_path = os.path.join(self.folder, f"{name}-{len(self.processes)}.log")
        with open(log_path, "a") as log:  # what `_read` adds is not written over
            popen = subprocess.Popen(
                [*prefix, sys.executable, "-m", "kvferry", *words],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(environment or {})},
                cwd=self.folder,
                start_new_session=True,  # an interrupt from the keyboard reaches us, and we end it in order
            )
        process = Process(name, popen, log_path)
        process.reader = threading.Thread(target=_read, args=(process,), name=f"read-{name}", daemon=True)
        process.reader.start()
        self.processes.append(process)
        return process

    def ready(self, process: Process, seconds: float = START_SECONDS) -> str:
        """Waits for its ready line and returns the address in it. StackError where it ends or takes too long."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return process.addresses.get(timeout=0.1)
            except queue.Empty:
                if process.popen.poll() is not None and process.addresses.empty():
                    code = process.popen.returncode
                    raise StackError(
                        f"{process.name} ended with {code} before it was ready:\n{process.tail()}"
                    ) from None
                if time.monotonic() > deadline:
                    raise StackError(f"{process.name} was not ready in {seconds:.0f} s:\n{process.tail()}") from None

    def stop(self, process: Process, seconds: float = STOP_SECONDS) -> int:
        """Stops the process by SIGTERM, then SIGKILL after the deadline; returns the exit status."""
        if process.popen.poll() is None:
            process.popen.send_signal(signal.SIGTERM)
            try:
                process.popen.wait(seconds)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
        self._reap(process)
        return process.popen.returncode

    def kill(self, process: Process) -> None:
        process.popen.kill()
        process.popen.wait()
        self._reap(process)

    def close(self) -> dict[str, int]:
        """Ends everything: front end and workers before their daemons. Returns the exit status of each."""
        statuses = {process.name: self.stop(process) for process in reversed(self.processes)}
        self.processes.clear()
        with contextlib.suppress(OSError):
            self._folder.cleanup()
        return statuses

    def _reap(self, process: Process) -> None:
        if process.reader is not None:
            process.reader.join(5.0)
        if process.popen.stdout is not None:
            process.popen.stdout.close()


def lasting_port(host: str = "127.0.0.1") -> int:
    """A free port that nobody is given by chance: a process that ended finds it free again. Above those of couriers,
    below those of outgoing connections."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as range_:
        outgoing = int(range_.read().split()[0])
    while True:
        port = random.SystemRandom().randrange(26_000, max(outgoing, 27_000))
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                if error.errno != errno.EADDRNOTAVAIL:  # the host is another network's
                    raise
        return port


def _read(process: Process) -> None:
    assert process.popen.stdout is not None
    with open(process.log_path, "a") as log:
        for line in process.popen.stdout:
            log.write(line)
            log.flush()
            if line.startswith("ready: "):
                process.addresses.put(line.split()[-1])
