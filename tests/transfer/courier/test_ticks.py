"""A courier that has work without a pause still waits now and then, so that its daemon can tell it from a stuck one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.daemon.observe.health import _waits_of

# Its agent has news in every round, and what it watches can be read in every round: no select() waits.
SPINNING = """
import socket, sys
from kvferry.transfer.courier import main as courier
from kvferry.transfer.courier.messages import CourierSetup

class Agent:
    def get_new_notifs(self):
        return {"": []}

devices = tuple(map(int, sys.argv[1:]))
orders, daemon = socket.socketpair()
readable, other = socket.socketpair()
other.send(b"x")
orders.setblocking(False)
made = courier.Courier(orders, None, CourierSetup(4096, 2, 2, 0, devices), Agent())
made._expected = 1
made._event_sets = [readable.fileno()]
print("runs", flush=True)
made.run()
"""


@pytest.fixture(params=["", "0"], ids=["host", "gpu"])
def courier(request: pytest.FixtureRequest) -> Iterator[int]:
    words = [sys.executable, "-c", SPINNING, *request.param]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        yield process.pid
        process.kill()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def test_a_courier_that_spins_ticks_and_a_stopped_one_does_not(courier: int) -> None:
    for _ in range(3):
        before = _waits_of(courier)
        assert before is not None
        until(lambda: _waits_of(courier) != before)  # noqa: B023
    os.kill(courier, signal.SIGSTOP)
    until(lambda: state_of(courier) == "T")
    stopped = _waits_of(courier)
    time.sleep(0.5)
    assert _waits_of(courier) == stopped
    os.kill(courier, signal.SIGCONT)
    until(lambda: _waits_of(courier) != stopped)
