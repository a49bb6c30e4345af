"""The memory that is free for this process, by whatever bounds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    name: str  # of the bound
    nbytes: int

    def lacks(self, wanted: int) -> str:
        """Why so many bytes do not fit; "" where they do."""
        return f"{wanted} bytes are wanted, {self.name} leaves {self.nbytes}" if wanted > self.nbytes else ""


def meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def rooms() -> Iterator[MemoryRoom]:
    """The machine's memory, and that of each cgroup (v2, or the one that v1 names) in which this process is."""
    yield MemoryRoom("MemAvailable of /proc/meminfo", meminfo("MemAvailable"))
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0":
            folder = CGROUPS / path.strip("/")
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder = CGROUPS / "memory" / path.strip("/")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for each in (folder, *folder.parents):
            if each in CGROUPS.parents:
                break
            if (room := _of_cgroup(each, *names)) is not None:
                yield room


def _of_cgroup(folder: Path, limit: str, current: str, reclaimed: str) -> MemoryRoom | None:
    try:
        most, used = int((folder / limit).read_text()), int((folder / current).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # none, or "max"
        return None
    return MemoryRoom(f"{folder / limit} ({most})", max(0, most - used + int(stat.get(reclaimed, 0))))


def lacks(nbytes: int) -> str:
    """Why so many bytes more do not fit; "" where they do."""
    tightest = min(rooms(), key=lambda room: room.nbytes)
    return tightest.lacks(nbytes)
