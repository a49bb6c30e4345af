"""Resources that a machine runs out of: refused with a message that names them, and served again once they are
there."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvferry.daemon.cli.stack import Stack, StackError
from kvferry.daemon.cli.system import start_replicas
from tests.support.engines import Engines, courier_pids, grown, settled, stats
from tests.support.stacks import SmallSystem

PAGE = 16
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.nightly
def test_shared_memory_that_is_full(stack: Stack, small_disk: Path) -> None:
    socket = os.path.join(stack.folder, "d.sock")
    serve = ["serve", "--role", "decode", "--listen", "127.0.0.1:0", "--socket", socket, "--page-size", str(PAGE)]
    daemon = stack.start("daemon", [*serve, "--shm-dir", str(small_disk), "--pool-bytes", "16MiB"])
    stack.ready(daemon)
    worker = stack.start("worker", ["worker", "decode", "--socket", socket, "--listen", "127.0.0.1:0", "--synthetic"])
    with pytest.raises(StackError, match="No space left on device"):
        stack.ready(worker, 30)
    assert daemon.popen.poll() is None, "the daemon waits for a worker that fits"
    left = [name for name in os.listdir(small_disk) if "pool" in name]
    assert not left, "half a pool is left"


@pytest.mark.nightly
def test_a_disk_that_is_full(stack: Stack, small_disk: Path) -> None:
    spec = SmallSystem(page_size=PAGE, decode_flags=["--host-bytes", "16MiB", "--host-dir", str(small_disk / "host")])
    _, decodes = start_replicas(stack, spec)
    words = rf"the host tier stays at 0 of \d+ pages: .*bytes are wanted, the disk of {small_disk}/host/.* leaves \d+"
    end = time.monotonic() + 20
    while not re.search(words, decodes[0].daemon.tail()):
        assert time.monotonic() < end, decodes[0].daemon.tail()
        time.sleep(0.05)
    assert stats(decodes[0]).host.pages == 0


@pytest.mark.nightly
def test_a_disk_that_fills_up_behind_the_host_tiers_back(stack: Stack, small_disk: Path) -> None:
    """Its file is allocated when it is made: what others fill later takes nothing from it."""
    flags = ["--host-bytes", "1MiB", "--host-dir", str(small_disk / "host"), "--pool-bytes", "512KiB"]
    prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE, decode_flags=flags))
    grown(decodes[0])
    with Engines(prefills[0], decodes[0]) as engines:
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "other").write_bytes(bytes(4 << 20))
        for number in range(24):
            assert engines.turn([number] * 200, 4).error is None
        assert stats(decodes[0]).tiers.spilled_pages > 0
    settled(decodes[0])


def test_too_few_descriptors(stack: Stack) -> None:
    socket = os.path.join(stack.folder, "d.sock")
    words = ["serve", "--role", "decode", "--listen", "127.0.0.1:0", "--socket", socket]
    daemon = stack.start("daemon", words, prefix=["prlimit", "--nofile=256:256"])
    with pytest.raises(StackError, match="--max-peers 64 and --max-workers 64 need 1408 open files"):
        stack.ready(daemon, 30)


@pytest.mark.nightly
def test_descriptors_that_run_out_under_load(stack: Stack) -> None:
    """No courier can be started then: what needs a session fails and says why, and it comes up once there is room."""
    prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE))
    daemon = decodes[0].daemon.popen.pid
    limits = resource.prlimit(daemon, resource.RLIMIT_NOFILE)
    with Engines(prefills[0], decodes[0]) as engines:
        assert engines.turn([1] * 100, 4).error is None
        resource.prlimit(daemon, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{daemon}/fd")) // 2, limits[1]))
        for pid in courier_pids(daemon):
            os.kill(pid, signal.SIGKILL)
        for number in range(3):
            turn = engines.turn([2 + number] * 100, 4, deadline_s=2)
            assert turn.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), turn.details
        assert decodes[0].daemon.popen.poll() is None, "it lives on without"
        resource.prlimit(daemon, resource.RLIMIT_NOFILE, limits)
        until = time.monotonic() + 20
        while (turn := engines.turn([9] * 100, 4, deadline_s=3)).error is not None:
            assert time.monotonic() < until, turn.details
    settled(decodes[0])
