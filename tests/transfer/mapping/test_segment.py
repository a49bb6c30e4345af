"""Shared memory files, the locks that prove that a process lives, and what dead daemons leave behind."""

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.transfer.mapping.segment import FileLock, Segment, owned_files, reclaim_stale

MINE, OTHERS = "0" * 32, "f" * 32

HOLDER = """
import sys
from kvferry.transfer.mapping.segment import FileLock
lock = FileLock.open(sys.argv[1])
print(lock.try_acquire(), flush=True)
sys.stdin.read()
"""


def named(folder: Path, owner: str, what: str) -> str:
    return str(folder / f"kvferry-{owner}-{what}")


def test_two_mappings_share_the_bytes(tmp_path: Path) -> None:
    made = Segment.create(str(tmp_path), "kvferry-pool", 8192)
    opened = Segment.open(made.path, 8192)
    made.buffer[4096] = 7
    assert opened.buffer[4096] == 7
    opened.buffer[:3] = b"abc"
    assert bytes(made.buffer[:3]) == b"abc"
    for segment in (made, opened):
        segment.close()
        segment.close()


def test_the_file_is_private_and_its_memory_there(tmp_path: Path) -> None:
    segment = Segment.create(str(tmp_path), "kvferry-pool", 1 << 20)
    status = os.stat(segment.path)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20
    segment.unlink()
    segment.unlink()
    assert os.listdir(tmp_path) == []
    segment.buffer[0] = 1  # the mapping outlives the name
    segment.close()


def test_a_file_that_is_there_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "kvferry-pool"
    path.write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        Segment.create(str(tmp_path), path.name, 4096)
    assert path.read_bytes() == b"theirs"


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(bytes(4096))
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(FileExistsError):
        Segment.create(str(tmp_path), "link", 4096)
    with pytest.raises(OSError):
        Segment.open(str(tmp_path / "link"), 4096)
    with pytest.raises(OSError):
        FileLock.open(str(tmp_path / "link"))


def test_too_little_memory_is_an_error_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Segment.create(str(tmp_path), "kvferry-pool", 1 << 60)
    assert os.listdir(tmp_path) == []


def test_bad_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nbytes is 0"):
        Segment.create(str(tmp_path), "kvferry-pool", 0)
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(ValueError, match="has 1 bytes; 4096 are needed"):
        Segment.open(str(tmp_path / "short"), 4096)


def test_close_leaves_the_memory_to_views_that_live(tmp_path: Path) -> None:
    segment = Segment.create(str(tmp_path), "kvferry-pool", 4096)
    view = np.frombuffer(segment.buffer, np.uint8)
    segment.close()
    view[0] = 5
    assert view[0] == 5


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        segment = Segment.create(str(tmp_path), f"kvferry-{number}", 4096)
        again = Segment.open(segment.path, 4096)
        lock = FileLock.create(str(tmp_path / f"lock-{number}"))
        again.close()
        segment.close()
        lock.close()
        lock.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lock_is_held_by_one_and_goes_with_its_process(tmp_path: Path) -> None:
    lock = FileLock.create(str(tmp_path / "lock"))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert not lock.try_acquire()
        holder.kill()
        holder.wait(30)
    assert lock.try_acquire()
    other = FileLock.open(lock.path)
    assert not other.try_acquire()
    lock.release()
    assert other.try_acquire()
    lock.close()
    other.close()


def test_create_held_is_held_from_its_first_moment(tmp_path: Path) -> None:
    lock = FileLock.create_held(named(tmp_path, MINE, "lock"))
    assert os.listdir(tmp_path) == [os.path.basename(lock.path)]
    other = FileLock.open(lock.path)
    assert not other.try_acquire()
    lock.close()
    assert other.try_acquire()
    other.close()


def test_files_of_the_dead_are_reclaimed_and_no_others(tmp_path: Path) -> None:
    mine = FileLock.create_held(named(tmp_path, MINE, "lock"))
    kept = [named(tmp_path, MINE, "decode-pool"), named(tmp_path, "a" * 32, "decode-pool")]  # the second has no lock
    kept += [str(tmp_path / name) for name in ("kvferry-readme", "other", f"kvferry-{OTHERS}-UPPER")]
    gone = [named(tmp_path, OTHERS, what) for what in ("lock", "decode-pool", "prefill-worker-1")]
    for path in kept + gone:
        Path(path).touch(0o600)
    removed = reclaim_stale(str(tmp_path))
    assert sorted(removed) == sorted(gone)
    assert removed[-1] == named(tmp_path, OTHERS, "lock")
    assert sorted(os.path.join(tmp_path, name) for name in os.listdir(tmp_path)) == sorted([*kept, mine.path])
    mine.close()


def test_a_lock_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "shm"
    folder.mkdir()
    target = tmp_path / "target"
    target.touch()
    os.symlink(target, named(folder, OTHERS, "lock"))
    Path(named(folder, OTHERS, "decode-pool")).touch()
    assert reclaim_stale(str(folder)) == []
    assert target.exists()
    assert len(os.listdir(folder)) == 2


def test_a_segment_that_somebody_still_looks_at_can_be_closed(tmp_path: Path) -> None:
    segment = Segment.create(str(tmp_path), "looked-at", 4096)
    view = np.frombuffer(segment.buffer, np.uint8)
    segment.close()
    assert view[0] == 0


def test_a_lock_file_that_was_never_finished_is_reclaimed_once_it_is_old(tmp_path: Path) -> None:
    old, young, held = (Path(named(tmp_path, owner * 32, "lock.new")) for owner in "abc")
    for path in (old, young, held):
        path.touch(0o600)
    for path in (old, held):
        os.utime(path, (1.0, 1.0))
    lock = FileLock.open(str(held))
    assert lock.try_acquire()
    assert reclaim_stale(str(tmp_path)) == [str(old)]
    assert sorted(tmp_path.iterdir()) == [young, held]
    lock.close()


def test_the_files_of_one_daemon(tmp_path: Path) -> None:
    paths = [named(tmp_path, MINE, what) for what in ("decode-pool", "lock", "prefill-worker-1")]
    for path in [*paths, named(tmp_path, OTHERS, "decode-pool")]:
        Path(path).touch()
    assert owned_files(str(tmp_path), bytes.fromhex(MINE)) == [paths[0], paths[2]]


def test_a_lock_file_has_its_name_only_once_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another daemon that starts could take it for a dead one's, and remove it."""
    path, seen = named(tmp_path, MINE, "lock"), list[bool]()
    flock = fcntl.flock

    def watched(fd: int, operation: int) -> None:
        seen.append(os.path.exists(path))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", watched)
    lock = FileLock.create_held(path)
    assert seen == [False] and os.path.exists(path)
    lock.close()


def test_a_file_of_an_engine_is_mapped_where_it_is_one(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.touch()
    os.truncate(path, 8192)
    segment = Segment.open_within(str(tmp_path), "pool", 8192)
    assert path.stat().st_blocks * 512 >= 8192, "a hole would be a bus error once the memory is full"
    segment.buffer[5] = 1
    assert path.read_bytes()[5] == 1
    segment.close()


def test_what_is_no_file_of_this_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "shm"
    folder.mkdir()
    for path in (tmp_path / "outside", folder / "pool"):
        path.write_bytes(bytes(4096))
    (folder / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("", ".", "..", "../outside", str(tmp_path / "outside"), "x/../pool"):
        with pytest.raises(ValueError, match="is not the plain name of a file"):
            Segment.open_within(str(folder), name, 4096)
    with pytest.raises(OSError, match="link"):
        Segment.open_within(str(folder), "link", 4096)
    with pytest.raises(ValueError, match="not a plain file"):
        Segment.open_within(str(folder), "pipe", 4096)
    for nbytes in (4095, 4097):
        with pytest.raises(ValueError, match=f"it has 4096 bytes; {nbytes} were registered"):
            Segment.open_within(str(folder), "pool", nbytes)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match="belongs to user"):
        Segment.open_within(str(folder), "pool", 4096)
    assert len(os.listdir("/proc/self/fd")) == before
