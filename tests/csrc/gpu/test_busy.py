"""A device that others keep busy, as probes and earlier copies tell it, over the fake driver."""

import ctypes
import time

from kvferry._core import GpuCopyEngine
from tests.csrc.gpu.driver import answer, calls
from tests.csrc.gpu.row_copies import SMALL, RowCopies


def test_busy(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = RowCopies(engine, SMALL)  # its memory outlives the copies
    assert not engine.busy()
    time.sleep(0.01)  # what was found is old
    answer(fake, "event_query", 600)
    launched = calls(fake, "launch")
    assert engine.busy() and engine.busy()
    assert calls(fake, "launch") == launched + 1  # the second answer is the first probe's
    answer(fake, "event_query", 0)
    answer(fake, "elapsed_us", 10)
    time.sleep(0.01)
    assert not engine.busy()  # once may have been chance
    answer(fake, "event_query", 600)
    time.sleep(0.01)
    assert engine.busy()
    answer(fake, "event_query", 0)
    time.sleep(0.1)
    assert engine.busy()  # twice was not
    time.sleep(1)
    assert not engine.busy()
    answer(fake, "elapsed_us", 300)
    engine.copy_pages_to_host(*world.arguments(), strategy="pitched")
    assert engine.busy()  # the probe that followed the copy took long
    time.sleep(1.05)
    answer(fake, "elapsed_us", 10)
    assert not engine.busy()
    engine.copy_pages_to_host(*world.arguments(), strategy="staged")
    answer(fake, "elapsed_us", 900)
    assert engine.busy()  # the copy's kernel waited
    answer(fake, "module_load", 801)
    assert not GpuCopyEngine(0, library).busy()


def test_mps_is_known_where_the_driver_tells(fake: ctypes.CDLL, library: str) -> None:
    assert not GpuCopyEngine(0, library).mps
    answer(fake, "mps", 1)
    assert GpuCopyEngine(0, library).mps
    assert not GpuCopyEngine(0, library, "hip").mps, "it has no such attribute"
    answer(fake, "device_attribute", 1)
    assert not GpuCopyEngine(0, library).mps, "an older driver"


def test_one_slow_probe_counts_once(fake: ctypes.CDLL, library: str) -> None:
    engine, took = GpuCopyEngine(0, library), 1.0
    for _ in range(50):
        engine = GpuCopyEngine(0, library)
        answer(fake, "event_query", 600)
        began = time.monotonic()
        assert engine.busy()
        answer(fake, "event_query", 0)
        answer(fake, "elapsed_us", 300)
        assert engine.busy()  # it has ended, and was slow
        answer(fake, "elapsed_us", 10)
        took = time.monotonic() - began
        if took < 0.004:  # there was no other one
            break
    assert took < 0.004
    time.sleep(0.01)
    assert not engine.busy()
