"""The host tier's memory: what files may be, who may have them open, and the checksums of rows."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvferry.transfer.host_tier import rows as host_rows
from kvferry.transfer.host_tier.index import ENTRY_BYTES, HEADER_BYTES
from kvferry.transfer.host_tier.rows import (
    SPARED,
    AnonymousRows,
    FileRows,
    TierRows,
    checksum_rows,
    verify_rows,
)
from kvferry.transfer.mapping import memory_room
from kvferry.transfer.mapping.memory_room import MemoryRoom

PAGE, PAGES = 512, 16
LAYOUT = b"l" * 32

HOLDER = """
import sys
from kvferry.transfer.host_tier.rows import FileRows
rows = FileRows.open(sys.argv[1], pages=16, page_bytes=512, layout=b"l" * 32, role="decode")
print("open", flush=True)
sys.stdin.read()
"""


def open_rows(
    folder: Path, pages: int = PAGES, page_bytes: int = PAGE, layout: bytes = LAYOUT, role: str = "decode"
) -> FileRows:
    return FileRows.open(str(folder), pages=pages, page_bytes=page_bytes, layout=layout, role=role)


@contextlib.contextmanager
def opened(folder: Path, **changes: int) -> Iterator[FileRows]:
    rows = open_rows(folder, **changes)  # type: ignore[arg-type]
    try:
        yield rows
    finally:
        rows.close()


def test_the_files_are_private_and_their_memory_there_once_it_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    before = os.umask(0)
    try:
        with opened(folder, pages=100, page_bytes=8192) as rows:
            assert len(rows.buffer) == 819200
            assert not rows.buffer.readonly
            assert (folder / "kvferry-host-decode.rows").stat().st_blocks * 512 < 819200
            rows.make(0, 409600, ())
            rows.make(409600, 819200, ())
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(os.listdir(folder)) == ["kvferry-host-decode.index", "kvferry-host-decode.rows"]
    for name, size in (("rows", 819200), ("index", HEADER_BYTES + 100 * ENTRY_BYTES)):
        status = os.stat(folder / f"kvferry-host-decode.{name}")
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == size
        assert status.st_blocks * 512 >= size


def put(rows: FileRows, row: int, page_bytes: int) -> None:
    """A page that is its row's number, and an entry of it."""
    rows.buffer[row * page_bytes : (row + 1) * page_bytes] = bytes([row]) * page_bytes
    rows.write([row], bytes(32), bytes([row]) * 32, bytes(32), checksum_rows(rows.buffer, [row], page_bytes))


def intact(rows: FileRows, page_bytes: int) -> list[int]:
    found = rows.recover()
    assert verify_rows(rows.buffer, found.rows, page_bytes, found.checksums) == []
    return [int(row) for row in found.rows]


def test_rows_that_are_let_go_have_no_room_on_the_disk_but_for_what_entries_name(tmp_path: Path) -> None:
    page, path = mmap.PAGESIZE, tmp_path / "kvferry-host-decode.rows"
    with opened(tmp_path, page_bytes=page) as rows:
        rows.make(0, PAGES * page, ())
        put(rows, 9, page)
        whole = path.stat().st_blocks * 512
        rows.unmake(4 * page, PAGES * page)
        assert whole - path.stat().st_blocks * 512 == (PAGES - 4 - 1) * page
        assert path.stat().st_size == PAGES * page
        assert intact(rows, page) == [9]
        rows.make(4 * page, PAGES * page, ())
        assert path.stat().st_blocks * 512 == whole


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("pages", [PAGES // 2, PAGES, 2 * PAGES])
def test_files_of_other_rows_give_back_no_more_than_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int, in_memory: bool
) -> None:
    """A second for 6 GiB of a tmpfs, in which the first worker waits. What the file has then needs no room. On a disk
    it would be read as rows are made."""
    page, path = mmap.PAGESIZE, tmp_path / "kvferry-host-decode.rows"
    with opened(tmp_path, page_bytes=page) as rows:
        rows.make(0, PAGES * page, ())
        put(rows, 3, page)
    cut, sizes, kept = os.ftruncate, list[int](), min(pages, PAGES) * page

    def noted(fd: int, nbytes: int) -> None:
        if os.path.samestat(os.fstat(fd), path.stat()):
            sizes.append(nbytes)
        cut(fd, nbytes)

    monkeypatch.setattr(os, "ftruncate", noted)
    monkeypatch.setattr(host_rows, "disk_room", lambda fd: 0)
    monkeypatch.setattr(host_rows, "_check_space", lambda stem, fd, wanted: None)
    monkeypatch.setattr(host_rows, "is_memory", lambda file: in_memory)
    rows = open_rows(tmp_path, pages, page, b"k" * 32)
    if in_memory:
        assert sizes == [pages * page]
        assert path.stat().st_blocks * 512 >= kept and rows.lacks(0, kept) == ""
    else:
        assert sizes == [0, pages * page]
    assert rows.named(b"", 0).tolist() == rows.recover().rows.tolist() == []
    rows.unmake(0, pages * page)
    assert path.stat().st_blocks * 512 < page, "no entry keeps them"
    rows.close()


def test_rows_of_memory_that_were_let_go_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others, made behind them by an earlier run, do not stand for them."""
    page = mmap.PAGESIZE
    monkeypatch.setattr(memory_room, "rooms", lambda: iter([MemoryRoom("a machine", 1)]))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, opened(Path(folder), page_bytes=page) as rows:
        rows.make(0, PAGES * page, ())
        rows.unmake(4 * page, 8 * page)
        assert rows.lacks(0, 4 * page) == rows.lacks(8 * page, 12 * page) == ""
        assert rows.lacks(4 * page, 8 * page).startswith(f"{4 * page + 8 * page // SPARED} bytes are wanted")
        assert rows.lacks(6 * page, 12 * page).startswith(f"{2 * page + 12 * page // SPARED} bytes are wanted")


@pytest.mark.parametrize("fails", [False, True])
def test_rows_of_a_file_in_memory_are_made_near_a_device_before_they_are_allocated(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, near, said = mmap.PAGESIZE, frozenset({0}), list[str]()
    make, allocate = host_rows.populate, os.posix_fallocate

    def populated(memory: memoryview, cpus: Collection[int] = (), **how: int) -> None:
        if cpus == near:
            said.append("populated")
            if fails:
                raise OSError(errno.EFAULT, "Bad address")
        make(memory, cpus, **how)

    def allocated(fd: int, offset: int, nbytes: int) -> None:
        said.append("allocated")
        allocate(fd, offset, nbytes)

    monkeypatch.setattr(host_rows, "populate", populated)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, opened(Path(folder), page_bytes=page) as rows:
        monkeypatch.setattr(os, "posix_fallocate", allocated)
        rows.make(0, PAGES * page, near)
        assert said == ["populated", "allocated"]
        assert os.stat(Path(folder, "kvferry-host-decode.rows")).st_blocks * 512 == PAGES * page


def test_rows_know_whether_they_take_memory(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, opened(Path(folder)) as rows:
        assert rows.in_memory
    with opened(tmp_path) as rows, (tmp_path / "kvferry-host-decode.rows").open() as file:
        assert rows.in_memory == memory_room.is_memory(file.fileno())


def test_rows_that_share_a_page_of_memory_with_others_are_let_go_without_it(tmp_path: Path) -> None:
    page, there = 1024, [0, 1, 5, 7, 14]
    with opened(tmp_path, page_bytes=page) as rows:
        rows.make(0, PAGES * page, ())
        for row in there:
            put(rows, row, page)
        rows.unmake(page, PAGES * page)
        assert intact(rows, page) == there


def test_a_disk_that_cannot_let_go_keeps_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(memory: memoryview, how: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr("kvferry.transfer.host_tier.rows.let_go", cannot)
    with opened(tmp_path) as rows:
        rows.unmake(0, PAGES * PAGE)


def test_files_that_others_could_read_are_made_private(tmp_path: Path) -> None:
    open_rows(tmp_path).close()
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    open_rows(tmp_path).close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_one_holder_at_a_time_and_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(BlockingIOError, match=r"in use.*kvferry-host-decode\.rows"):
            open_rows(tmp_path)
        open_rows(tmp_path, role="prefill").close()
        (tmp_path / "kvferry-host-decode.rows").unlink()  # the index alone keeps a second one out
        with pytest.raises(BlockingIOError, match=r"in use.*kvferry-host-decode\.index"):
            open_rows(tmp_path)
        holder.kill()
        holder.wait(30)
    open_rows(tmp_path).close()


def test_who_is_patient_has_the_files_of_a_holder_that_ends_meanwhile(tmp_path: Path) -> None:
    rows = open_rows(tmp_path)
    ending = threading.Timer(0.2, rows.close)
    ending.start()
    FileRows.open(str(tmp_path), pages=PAGES, page_bytes=PAGE, layout=LAYOUT, role="decode", patience_s=30.0).close()
    ending.join()


def test_close_lets_the_lock_go_once_nobody_can_write(tmp_path: Path) -> None:
    rows = open_rows(tmp_path)
    view = np.frombuffer(rows.buffer, np.uint8)
    rows.close()
    rows.close()
    view[0] = 5
    with pytest.raises(BlockingIOError):
        open_rows(tmp_path)
    del view
    with opened(tmp_path) as again:
        assert again.buffer[0] == 5
        with pytest.raises(BlockingIOError):
            open_rows(tmp_path)


def test_a_closed_one_has_no_rows(tmp_path: Path) -> None:
    rows = open_rows(tmp_path)
    rows.close()
    with pytest.raises(ValueError, match="row 0 is not there"):
        rows.clear([0])


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    (tmp_path / "kvferry-host-linked.index").symlink_to(tmp_path / "other")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        open_rows(tmp_path).close()
        for role, pages in (("linked", 1), ("decode", 1 << 28)):
            with pytest.raises(OSError):
                open_rows(tmp_path, pages, 1 << 30, role=role)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["rows", "index"])
def test_what_is_no_regular_file_of_ours_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"kvferry-host-decode.{name}"
    target = tmp_path / "target"
    target.write_bytes(b"theirs")
    path.symlink_to(target)
    with pytest.raises(OSError, match=f"symbolic link.*{name}") as caught:
        open_rows(tmp_path)
    assert caught.value.errno == errno.ELOOP
    path.unlink()
    path.symlink_to(tmp_path / "dangling")
    with pytest.raises(OSError, match="symbolic link"):
        open_rows(tmp_path)
    path.unlink()
    os.link(target, path)
    with pytest.raises(OSError, match=f"has 2 names.*{name}"):
        open_rows(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match=f"no regular file.*{name}"):
        open_rows(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError, match=name):
        open_rows(tmp_path)
    assert target.read_bytes() == b"theirs"
    assert not (tmp_path / "dangling").exists()


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_rows(tmp_path).close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match=r"belongs to user .*kvferry-host-decode\.rows"):
        open_rows(tmp_path)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    for role in ("", "../up", "a/b", "Decode", "x" * 33, "decode\n"):
        with pytest.raises(ValueError, match="role is"):
            open_rows(tmp_path, role=role)
    with pytest.raises(ValueError, match="pages is 0"):
        open_rows(tmp_path, pages=0)
    with pytest.raises(ValueError, match="layout has 1 bytes; it must have 32"):
        open_rows(tmp_path, layout=b"l")
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        open_rows(tmp_path / "missing" / "below")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        open_rows(tmp_path / "file")


def test_checksums_are_of_the_rows_and_tell_which_differ() -> None:
    data = bytearray(random.Random(2).randbytes(8 * PAGE + 100))  # the last bytes are no whole row
    view = memoryview(data)
    sums = checksum_rows(view, np.array([3, 0, 7]), PAGE)
    assert sums.dtype == np.uint64
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(data[row * PAGE :][:PAGE]) for row in (3, 0, 7)]
    assert verify_rows(view, [3, 0, 7], PAGE, sums) == []
    data[0] ^= 1
    data[8 * PAGE - 1] ^= 1
    assert verify_rows(view, [3, 0, 7], PAGE, sums) == [0, 7]
    assert checksum_rows(view, [], PAGE).shape == (0,)
    assert verify_rows(view, [], PAGE, np.zeros(0, np.uint64)) == []
    for row in (-1, 8):
        with pytest.raises(ValueError, match=f"row {row} is not there; rows are 0 to 7"):
            checksum_rows(view, [row], PAGE)
    with pytest.raises(ValueError, match="expected has shape"):
        verify_rows(view, [1, 2], PAGE, sums)


def test_others_run_while_a_row_is_read() -> None:
    """The lock of the interpreter is let go: counted is how often this thread gets to run meanwhile."""
    size = 256 << 20
    row = memoryview(bytearray(size))

    def turns() -> int:
        reader = threading.Thread(target=checksum_rows, args=(row, [0], size))
        reader.start()
        count = 0
        while reader.is_alive():
            time.sleep(0.0002)
            count += 1
        return count

    assert any(turns() > 5 for _ in range(5))  # one may be slow where other processes are busy


def test_anonymous_rows_are_there_once_they_are_made() -> None:
    rows: TierRows = AnonymousRows(PAGES, PAGE)
    assert len(rows.buffer) == PAGES * PAGE
    rows.make(0, 2 * PAGE, ())
    rows.buffer[PAGE : PAGE + 3] = b"abc"
    rows.make(2 * PAGE, PAGES * PAGE, ())
    assert bytes(rows.buffer[PAGE : PAGE + 4]) == b"abc\0", "a neighbour's bytes stay what they are"
    assert not any(rows.buffer[2 * PAGE :])
    assert rows.recover(0, PAGES) is None
    view = rows.buffer[:PAGE]
    rows.close()
    rows.close()
    assert len(view) == PAGE, "it is there while somebody looks at it"


def test_anonymous_rows_leave_some_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_room, "rooms", lambda: iter([MemoryRoom("a machine", 17 << 20)]))
    rows = AnonymousRows(1, 32 << 20)
    assert rows.lacks(0, 16 << 20) == ""
    assert rows.lacks(16 << 20, 32 << 20).startswith(f"{18 << 20} bytes"), "a part of what there is before, too"
    assert rows.lacks(0, 32 << 20) == f"{34 << 20} bytes are wanted, a machine leaves {17 << 20}"
    rows.close()


@pytest.mark.parametrize("pages", [1 << 28, 1 << 40])
def test_more_addresses_than_a_process_has_are_an_error(pages: int) -> None:
    with pytest.raises(OSError):
        AnonymousRows(pages, 1 << 30)


def test_file_rows_are_tier_rows(tmp_path: Path) -> None:
    rows: TierRows = open_rows(tmp_path)
    assert len(rows.buffer) == PAGES * PAGE
    rows.close()
