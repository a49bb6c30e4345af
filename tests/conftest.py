"""What every worker of a run pays, made cheap: each collects all tests, and has them in its memory until the end.

* The collector of garbage is off meanwhile, and looks at nothing later that was there when collection ended.
* Linear algebra has one thread here and in the processes of the tests, whose models are small: several threads wait for
  each other by spinning, on cores that others need.
* Rewritten asserts are kept in __pycache__, where that may be written. Each worker begins at a place of its own, so
  that it finds what the others have written when it comes to theirs; the order of the tests is everybody's.

No example of Hypothesis's has a deadline: a loaded machine would miss it.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Generator
from itertools import accumulate
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # a machine with GPUs may lack it
    from hypothesis import settings

    settings.register_profile("kvferry", deadline=None)
    settings.load_profile("kvferry")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read as torch is imported
TESTS = Path(__file__).parent
order: list[Path] = []  # of what lies in this folder


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    worker: dict[str, object] = getattr(collector.config, "workerinput", {})  # of pytest-xdist
    if worker and collector.path == TESTS and isinstance(collector, pytest.Directory) and report.result:
        order[:] = [node.path for node in report.result]
        begun = start([len(list(path.rglob("test_*.py"))) for path in order], worker)
        report.result = [*report.result[begun:], *report.result[:begun]]
    return report


def start(files: list[int], worker: dict[str, object]) -> int:
    """Index of the first folder of this worker, such that each begins as many files after another."""
    number, workers = int(str(worker["workerid"]).removeprefix("gw")), int(str(worker["workercount"]))
    share = sum(files) * (number % workers) / workers
    return next((index for index, end in enumerate(accumulate(files)) if end > share), 0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {path: index for index, path in enumerate(order)}
    if places:
        items.sort(key=lambda item: max(places.get(path, -1) for path in (item.path, *item.path.parents)))
