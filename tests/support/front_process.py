"""`kvferry front` as a process, and how it refuses."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.daemon.cli import main as cli

READY = "ready: front "


@dataclass
class FrontProcess:
    url: str
    process: subprocess.Popen[str]
    log: str = ""  # of stderr, once it has ended

    def end(self) -> str:
        """Ends it in order, and gives what it has logged."""
        self.process.send_signal(signal.SIGTERM)
        _, self.log = self.process.communicate(timeout=20)
        assert self.process.returncode == 0, self.log
        return self.log


@contextmanager
def front_process(*flags: str) -> Iterator[FrontProcess]:
    """One that is ready; killed in the end, where it still runs."""
    command = [sys.executable, "-m", "kvferry", "front", "--listen", "127.0.0.1:0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(READY), line or process.communicate(timeout=20)[1]
        yield FrontProcess(f"http://{line.removeprefix(READY).strip()}", process)
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate()


def refused(*flags: str) -> object:
    """The exit status of `kvferry front` in this process, where the flags cannot be; what it says is in stderr."""
    try:
        return cli.main(["front", "--listen", "127.0.0.1:0", *flags])
    except SystemExit as ended:
        return ended.code
