"""The end of a daemon's process, whatever keeps parts of it: the next daemon finds what it left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.transfer.mapping.segment import reclaim_stale
from tests.support.standstill import run_with_standstill

HANGING = """
import asyncio, contextlib, ctypes, os, sys, threading
from pathlib import Path
from kvferry.daemon import backstop, server
from kvferry.daemon.config.model import DaemonConfig

def fill_stderr():
    os.set_blocking(2, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(2, bytes(1 << 16)):
            pass
    with contextlib.suppress(BlockingIOError):
        while os.write(2, bytes(1)):
            pass
    os.set_blocking(2, True)

async def main(folder, what):
    server.END_SECONDS, backstop.LATER_SECONDS = 0.5, 0.5
    daemon = server.Daemon(
        DaemonConfig(role="decode", shm_dir=folder, metrics="", listen="127.0.0.1:0", socket=folder + "/d.sock"),
        leave=os._exit,
    )
    await daemon.start()
    Path(folder, f"kvferry-{daemon.incarnation.hex()}-decode-pool").touch()

    async def hang():
        if what == "interpreter":
            ctypes.PyDLL(None).pause()  # and keeps the interpreter
        threading.Event().wait()

    if what == "stderr":
        fill_stderr()
    daemon.sides["decode"].close = hang
    daemon.stop()
    await daemon.run_until_stopped()

asyncio.run(main(*sys.argv[1:]))
"""


def test_what_does_not_end_is_ended_with_the_process(tmp_path: Path) -> None:
    """The next daemon finds the lock file, and what may have come behind it."""
    words = [sys.executable, "-c", HANGING, str(tmp_path), "loop"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "has not ended within 0.5 s" in done.stderr
    assert "in hang" in done.stderr
    assert [name.rpartition("-")[2] for name in os.listdir(tmp_path) if name.startswith("kvferry-")] == ["lock"]
    assert len(reclaim_stale(str(tmp_path))) == 1


def test_an_end_that_keeps_the_interpreter_is_ended_too(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HANGING, str(tmp_path), "interpreter"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "in hang" in done.stderr
    assert len(reclaim_stale(str(tmp_path))) == 2


def test_a_stderr_that_nobody_reads_does_not_keep_the_process(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HANGING, str(tmp_path), "stderr"]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(timeout=60) == 1
        finally:
            process.kill()
    left = reclaim_stale(str(tmp_path))  # others, too, where it was ended in the middle of something
    assert any(name.endswith("-lock") for name in left)


STANDING_STILL = """
import asyncio, os, signal, sys
from kvferry.daemon import backstop, server
from kvferry.daemon.config.model import DaemonConfig

async def main(folder):
    server.END_SECONDS, backstop.LATER_SECONDS = 6.0, 0.5
    daemon = server.Daemon(
        DaemonConfig(role="decode", shm_dir=folder, metrics="", listen="127.0.0.1:0", socket=folder + "/d.sock"),
        leave=os._exit,
    )
    await daemon.start()
    close = daemon.sides["decode"].close

    async def stand_still():
        os.kill(os.getpid(), signal.SIGSTOP)
        await asyncio.sleep(0.1)
        await close()

    daemon.sides["decode"].close = stand_still
    daemon.stop()
    await daemon.run_until_stopped()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.nightly
def test_an_end_that_stands_still_is_not_ended(tmp_path: Path) -> None:
    done = run_with_standstill(STANDING_STILL, 8.0, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")
    assert os.listdir(tmp_path) == []
