"""The memory that is free for this process, by whatever bounds it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MOST_FOR_OTHERS = 2 << 30
CAP_IPC_LOCK = 14


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    name: str  # of the bound
    nbytes: int

    def lacks(self, wanted: int) -> str:
        """Why so many bytes do not fit; "" where they do."""
        return f"{wanted} bytes are wanted, {self.name} leaves {self.nbytes}" if wanted > self.nbytes else ""


def _meminfo() -> dict[str, int]:
    """Bytes, by the names of /proc/meminfo; none where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines) if value}


def of_the_machine() -> MemoryRoom | None:
    """The machine's memory, of which some stays with whoever else runs there: an eighth, 2 GiB at most. None where the
    system does not say."""
    found = _meminfo()
    if "MemAvailable" not in found:
        return None
    others = min(MOST_FOR_OTHERS, found.get("MemTotal", 0) // 8)
    name = f"MemAvailable of /proc/meminfo, of which {others >> 20} MiB are left to others"
    return MemoryRoom(name, max(0, found["MemAvailable"] - others))


def rooms() -> Iterator[MemoryRoom]:
    """The machine's memory, and that of each cgroup (v2, or the one that v1 names) in which this process is; what the
    system does not say is left out."""
    if (machine := of_the_machine()) is not None:
        yield machine
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0":
            folder = CGROUPS / path.strip("/")
            limits: tuple[str, ...] = ("memory.max", "memory.high")  # above "high" all of it is held up
            names = ("memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder = CGROUPS / "memory" / path.strip("/")
            limits, names = ("memory.limit_in_bytes",), ("memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for each in (folder, *folder.parents):
            if each in CGROUPS.parents:
                break
            found = (_of_cgroup(each, limit, *names) for limit in limits)
            yield from (room for room in found if room is not None)


def _of_cgroup(folder: Path, limit: str, current: str, reclaimed: str) -> MemoryRoom | None:
    try:
        most, used = int((folder / limit).read_text()), int((folder / current).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # none, or "max"
        return None
    return MemoryRoom(f"{folder / limit} ({most})", max(0, most - used + int(stat.get(reclaimed, 0))))


def tightest() -> MemoryRoom | None:
    return min(rooms(), key=lambda room: room.nbytes, default=None)


def lacks(nbytes: int) -> str:
    """Why so many bytes more do not fit; "" where they do."""
    room = tightest()
    return room.lacks(nbytes) if room is not None else ""


def of_addresses() -> str:
    """What bounds the addresses of this process, whether anything is there or not, for an operator."""
    limit, found = resource.getrlimit(resource.RLIMIT_AS)[0], _meminfo()
    words = [f"RLIMIT_AS is {'none' if limit == resource.RLIM_INFINITY else limit}"]
    with contextlib.suppress(OSError):
        words.append(f"vm.overcommit_memory {Path('/proc/sys/vm/overcommit_memory').read_text().strip()}")
    words += [f"{name} of /proc/meminfo {found[name]}" for name in ("CommitLimit", "Committed_AS") if name in found]
    return ", ".join(words)


def to_lock() -> MemoryRoom | None:
    """The memory that this process may still lock, as what is pinned for a device may count. None where nothing bounds
    it: no limit, or the right to lock more."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    told = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.strip()}
    if int(told.get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1:
        return None
    used = max(int(told.get(name, "0")) for name in ("VmLck", "VmPin")) * 1024
    return MemoryRoom(f"RLIMIT_MEMLOCK ({limit})", max(0, limit - used))


def is_memory(file: int | str | Path) -> bool:
    """Whether the bytes of an open file, or of those in a folder, are of the machine's memory, on a tmpfs."""
    device = os.stat(file).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = [line.partition(" - ")[2].split(" ", 1)[0] for line in mounts if line.split(" ", 3)[2] == name]
    return bool({"tmpfs", "ramfs"} & set(kinds))
