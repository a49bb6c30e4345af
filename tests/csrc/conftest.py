"""A fake GPU driver, whose device memory is this process's, and engines over it or over a real one."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry._core import GpuCopyEngine, GpuError, GpuUnavailable
from kvferry.daemon.memory import gpu_ranks
from kvferry.transfer.host_tier.copy_plan import GpuCopies
from kvferry.workers.smollm import made
from tests.csrc.gpu_orders import Orders
from tests.csrc.gpu_pool import Pool

LIBRARY = "libfake_gpu.so"
FAKE = ("driver.cpp", "kernels.cpp", "orders.cpp")
CSRC = Path(__file__).parents[2] / "csrc"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler to make the fake driver with")
    sources = [str(Path(__file__).parent / "fake_gpu" / name) for name in FAKE]
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{CSRC}", *sources, "-o"]

    def compiled(folder: Path) -> None:
        subprocess.run([*command, str(folder / LIBRARY)], check=True)

    base = tmp_path_factory.getbasetemp()
    of_run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # of all its workers
    return str(made(of_run / "fake_gpu", compiled) / LIBRARY)


@pytest.fixture
def orders(library: str) -> Orders:
    """Of the fake's operations."""
    return Orders(ctypes.CDLL(library))


@pytest.fixture
def fake(library: str, orders: Orders) -> Iterator[ctypes.CDLL]:
    """A test fails that gives it operations in no order with each other."""
    driver = ctypes.CDLL(library)
    driver.fake_reset()
    driver.fake_answer.argtypes = [ctypes.c_char_p, ctypes.c_long]
    driver.fake_foreign.restype = ctypes.c_uint64
    driver.fake_foreign.argtypes = [ctypes.c_size_t]
    driver.fake_foreign_ends.argtypes = [ctypes.c_uint64]
    yield driver
    driver.fake_reset()
    assert driver.fake_contexts() == 0, "a context was left current"
    orders.check()


@pytest.fixture
def on_the_fake(fake: ctypes.CDLL, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon's pools are."""

    def copiers(ordinal: int) -> tuple[GpuCopies, GpuCopies]:
        restores = GpuCopyEngine(ordinal, library)
        return GpuCopies(GpuCopyEngine(ordinal, library), restores=restores), GpuCopies(restores)

    monkeypatch.setattr(gpu_ranks, "copiers", copiers)
    monkeypatch.setattr(gpu_ranks, "gpu_device_ordinal", lambda uuid: uuid[0])


@pytest.fixture
def pool(fake: ctypes.CDLL, library: str, orders: Orders, on_the_fake: None) -> Iterator[Pool]:
    made = Pool(fake, library, orders)
    yield made
    made.close()


@pytest.fixture
def gpu_engine() -> Callable[..., GpuCopyEngine]:
    """Makes engines of a real device; skips where there is none."""

    def make(**tuning: int) -> GpuCopyEngine:
        try:
            return GpuCopyEngine(0, **tuning)
        except (GpuUnavailable, GpuError) as reason:
            pytest.skip(f"needs a GPU: {reason}")

    return make
