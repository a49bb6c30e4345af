"""Use of a whole system, sample by sample, and whether it grows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil

WARM = 0.2  # of the samples come before what is judged
ENDS = 5  # samples, of which the median is the start and the end


@dataclass(frozen=True, slots=True)
class Usage:
    """`kept`: of the processes that live for all of the test. The rest: of all processes below this one."""

    kept_kib: int
    kept_descriptors: int
    kept_threads: int
    resident_kib: int
    descriptors: int
    processes: int
    shared_files: int
    shared_kib: int


def usage_of(kept: Sequence[int], shm_dir: str) -> Usage:
    """`kept`: process ids."""
    mine = [0, 0, 0]
    total = [0, 0, 0]
    for process in psutil.Process().children(recursive=True):
        try:
            with process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                resident, descriptors = process.memory_info().rss >> 10, process.num_fds()
                total = [total[0] + resident, total[1] + descriptors, total[2] + 1]
                if process.pid in kept:
                    mine = [mine[0] + resident, mine[1] + descriptors, mine[2] + process.num_threads()]
        except psutil.NoSuchProcess:
            continue
    files = [entry.stat().st_blocks // 2 for entry in os.scandir(shm_dir)]
    return Usage(*mine, *total, len(files), sum(files))


@dataclass(frozen=True, slots=True)
class Trend:
    """Of one number: its medians at the start and the end, and what a thousand samples would add by its slope."""

    start: float
    end: float
    per_thousand: float


def trends(samples: Sequence[Usage]) -> dict[str, Trend]:
    steady = samples[int(len(samples) * WARM) :]
    found = {}
    for field in dataclasses.fields(Usage):
        values = [getattr(sample, field.name) for sample in steady]
        # Over the middle of neighbours: a sample in the midst of a restart is no growth.
        width = max(1, len(values) // 20)
        smooth = [float(np.median(values[i : i + width])) for i in range(0, len(values), width)]
        slope = float(np.polyfit(np.arange(len(smooth)) * width, smooth, 1)[0]) if len(smooth) > 1 else 0.0
        found[field.name] = Trend(float(np.median(values[:ENDS])), float(np.median(values[-ENDS:])), slope * 1000)
    return found


def table(samples: Sequence[Usage]) -> str:
    rows = [f"{'':<20}{'start':>12}{'end':>12}{'per 1,000':>12}"]
    for name, trend in trends(samples).items():
        if not trend.start and not trend.end:
            continue
        label = name.replace("_", " ")
        rows.append(f"{label:<20}{trend.start:>12.0f}{trend.end:>12.0f}{trend.per_thousand:>12.1f}")
    return "\n".join(rows)
