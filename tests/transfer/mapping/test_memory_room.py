"""The memory that is free for this process: that of the machine, and of each cgroup around it."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

import pytest

from kvferry.transfer.mapping import memory_room
from kvferry.transfer.mapping.memory_room import MemoryRoom

MACHINE, OTHERS = 10_000, 1_000  # kB that are free for this process, and that stay with others
NAME = f"MemAvailable of /proc/meminfo, of which {OTHERS >> 10} MiB are left to others"
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class Machine:
    """With a tree of cgroups, in which this process is at `within`: lines of /proc/self/cgroup."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.within: str | None = None
        read = Path.read_text

        def read_text(path: Path, *words: str) -> str:
            if str(path) == "/proc/meminfo":
                return f"MemTotal: {8 * OTHERS} kB\nMemAvailable:  {MACHINE + OTHERS} kB\nBuffers: 7 kB\nHugePages: 0\n"
            if str(path) != "/proc/self/cgroup":
                return read(path, *words)
            if self.within is None:
                raise FileNotFoundError(path)
            return self.within

        patch.setattr(memory_room, "CGROUPS", root)
        patch.setattr(Path, "read_text", read_text)

    def add(self, path: str, names: tuple[str, str, str], most: object, used: int, reclaimed: int) -> None:
        limit, current, inactive = names
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{most}\n")
        (folder / current).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{inactive} {reclaimed}\nfile 8\n")

    def left(self) -> dict[str, int]:
        """By the file that says the limit."""
        first, *others = memory_room.rooms()
        assert first == MemoryRoom(NAME, MACHINE * 1024)
        return {room.name.removeprefix(f"{self.root}/"): room.nbytes for room in others}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_each_cgroup_around_the_process_bounds_it(machine: Machine) -> None:
    machine.within = "0::/pods/one/daemon\n"
    machine.add("pods", V2, 9000, 5000, 1000)
    machine.add("pods/one", V2, 4000, 3000, 500)
    machine.add("pods/one/daemon", V2, "max", 10, 0)
    machine.add("pods/other", V2, 1, 1, 0)
    assert machine.left() == {"pods/one/memory.max (4000)": 1500, "pods/memory.max (9000)": 5000}
    assert memory_room.lacks(1500) == ""
    assert memory_room.lacks(1501) == (f"1501 bytes are wanted, {machine.root}/pods/one/memory.max (4000) leaves 1500")


def test_a_cgroup_that_is_held_up_before_its_limit_bounds_it(machine: Machine) -> None:
    machine.within = "0::/pods\n"
    machine.add("pods", V2, 9000, 5000, 1000)
    (machine.root / "pods" / "memory.high").write_text("7000\n")
    assert machine.left() == {"pods/memory.max (9000)": 5000, "pods/memory.high (7000)": 3000}
    assert "memory.high (7000) leaves 3000" in memory_room.lacks(3001)
    (machine.root / "pods" / "memory.high").write_text("max\n")
    assert machine.left() == {"pods/memory.max (9000)": 5000}


def test_a_cgroup_that_is_the_root_of_what_is_seen_bounds_it(machine: Machine) -> None:
    """As in a container with a namespace of its own."""
    machine.add("", V2, 4000, 5000, 500)
    for within in ("0::/\n", "0::/../../elsewhere\n"):
        machine.within = within
        assert machine.left() == {"memory.max (4000)": 0}, "it is over its limit"


def test_cgroups_of_the_first_version_bound_it(machine: Machine) -> None:
    machine.within = "7:cpu,cpuacct:/a\n5:hugetlb,memory:/docker/c1\n1:name=systemd:/b\n0::/unified\n"
    machine.add("memory", V1, 8000, 1000, 0)
    machine.add("memory/docker/c1", V1, 700, 600, 50)
    machine.add("a", V1, 1, 1, 0)
    found = {"memory/docker/c1/memory.limit_in_bytes (700)": 150, "memory/memory.limit_in_bytes (8000)": 7000}
    assert machine.left() == found


def test_what_cannot_be_read_bounds_nothing(machine: Machine) -> None:
    assert machine.left() == {}, "there are no cgroups"
    machine.within = "0::/some\n"
    assert machine.left() == {}, "there is no such folder"
    machine.add("some", V2, 4000, 1000, 0)
    (machine.root / "some/memory.stat").unlink()
    assert machine.left() == {}
    machine.add("some", V2, "many", 1000, 0)
    assert machine.left() == {}
    assert memory_room.lacks(MACHINE * 1024) == ""
    assert memory_room.lacks(MACHINE * 1024 + 1).endswith(f"{NAME} leaves {MACHINE * 1024}")


def test_of_this_machine_something_is_told() -> None:
    assert all(room.nbytes >= 0 for room in memory_room.rooms())
    room = memory_room.of_the_machine()
    assert room is not None and room.nbytes > 0


def test_what_the_system_does_not_say_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("MemTotal: 99 kB\n", None):

        def read_text(path: Path, *words: str, text: str | None = text) -> str:
            if text is None or str(path) != "/proc/meminfo":
                raise FileNotFoundError(path)
            return text

        monkeypatch.setattr(Path, "read_text", read_text)
        assert list(memory_room.rooms()) == [] and memory_room.tightest() is None
        assert memory_room.lacks(1 << 60) == ""


@pytest.mark.parametrize(
    ("limit", "status", "room"),
    [
        (resource.RLIM_INFINITY, "", None),
        (1 << 20, "VmLck:\t  64 kB\nVmPin:\t  128 kB\nCapEff:\t00000000a80425fb\n", (1 << 20) - (128 << 10)),
        (1 << 20, "VmLck:\t 4096 kB\nVmPin:\t    0 kB\nCapEff:\t0000000000000000\n", 0),
        (1 << 20, "VmLck:\t    0 kB\nCapEff:\t000001ffffffffff\n", None),
        (8 << 20, None, 8 << 20),
    ],
)
def test_what_may_be_locked(monkeypatch: pytest.MonkeyPatch, limit: int, status: str | None, room: int | None) -> None:
    def read_text(path: Path, *words: str) -> str:
        assert str(path) == "/proc/self/status"
        if status is None:
            raise FileNotFoundError(path)
        return status

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit) if which == resource.RLIMIT_MEMLOCK else ())
    expected = None if room is None else MemoryRoom(f"RLIMIT_MEMLOCK ({limit})", room)
    assert memory_room.to_lock() == expected


def test_files_on_a_tmpfs_are_memory(tmp_path: Path) -> None:
    on_shm = Path("/proc/mounts").read_text().count(" /dev/shm tmpfs ") > 0
    with tempfile.TemporaryFile(dir="/dev/shm" if on_shm else tmp_path) as file:
        assert memory_room.is_memory(file.fileno()) == on_shm
    with open(__file__) as file:
        assert not memory_room.is_memory(file.fileno())
