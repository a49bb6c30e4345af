"""A daemon that is stopped for longer than a courier may take to be reaped, while it reaps one, goes on living."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from kvferry.daemon.cli.system import start_replicas
from tests.faults.with_standstill import STOP_SECONDS
from tests.support.devices import WrappedStack
from tests.support.engines import Engines, courier_pids, settled, wait_until
from tests.support.stacks import SmallSystem
from tests.support.standstill import is_stopped

WITH_STANDSTILL = str(Path(__file__).with_name("with_standstill.py"))


@pytest.mark.nightly
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stands", ["decode-0", "prefill-0"])
def test_a_daemon_that_stands_still_while_it_reaps_a_courier_lives_on(stands: str) -> None:
    with WrappedStack(stands, [sys.executable, WITH_STANDSTILL]) as stack:
        prefills, decodes = start_replicas(stack, SmallSystem(page_size=16))
        prefill, decode = prefills[0], decodes[0]
        standing, other = (decode, prefill) if stands == decode.name else (prefill, decode)
        with Engines(prefill, decode) as engines:
            assert engines.turn(list(range(100)), 4).error is None
            (courier,) = courier_pids(other.daemon.popen.pid)
            os.kill(courier, signal.SIGKILL)  # both ends of the session end by it
            pid = standing.daemon.popen.pid
            wait_until(lambda: is_stopped(pid), 20, "that the daemon stops itself")
            time.sleep(2 * STOP_SECONDS)
            os.kill(pid, signal.SIGCONT)
            wait_until(lambda: engines.turn(list(range(100)), 4).error is None, 30, "that a turn is answered again")
        assert "an invariant is broken" not in Path(standing.daemon.log_path).read_text()
        for replica in (prefill, decode):
            # A turn that failed meanwhile may leave a prompt with prefill that nobody asks for, until its deadline.
            settled(replica, 45)
        assert stack.stop(standing.daemon) == 0
