"""The host tier's files after a restart: what is accepted is right, whatever became of them; the rest is a miss."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.transfer.host_tier import rows as rows_module
from kvferry.transfer.host_tier.index import ENTRY_BYTES, HEADER_BYTES, DropReason, Recovered, RecoveryReport
from kvferry.transfer.host_tier.rows import FileRows, checksum_rows, verify_rows

PAGE, PAGES = 512, 16
LAYOUT, SPACE, FIRST = b"l" * 32, b"n" * 32, bytes(32)

WRITER = """
import hashlib, random, sys
from kvferry.transfer.host_tier.rows import FileRows, checksum_rows
pages, page_bytes = 64, 16384
rows = FileRows.open(sys.argv[1], pages=pages, page_bytes=page_bytes, layout=b"l" * 32, role="decode")
rows.recover()
chance = random.Random(int(sys.argv[2]))
print("open", flush=True)
while True:
    some = chance.sample(range(pages), chance.randint(1, 24))
    rows.clear(some)
    digests = [hashlib.sha256(chance.randbytes(8)).digest() for _ in some]
    for row, digest in zip(some, digests):
        rows.buffer[row * page_bytes : (row + 1) * page_bytes] = digest * (page_bytes // 32)
    checksums = checksum_rows(rows.buffer, some, page_bytes)
    rows.write(some, b"n" * 32, b"".join(digests), bytes(32 * len(some)), checksums, 1)
"""


def open_rows(
    folder: Path, pages: int = PAGES, page_bytes: int = PAGE, layout: bytes = LAYOUT, role: str = "decode"
) -> FileRows:
    return FileRows.open(str(folder), pages=pages, page_bytes=page_bytes, layout=layout, role=role)


def content(digest: bytes, page_bytes: int = PAGE) -> bytes:
    return digest * (page_bytes // 32)


def digest_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def fill(rows: FileRows, numbers: dict[int, int]) -> None:
    """row -> number of the page that is put there, in the order that is asked for."""
    at = list(numbers)
    rows.clear(at)
    for row, number in numbers.items():
        rows.buffer[row * PAGE : (row + 1) * PAGE] = content(digest_of(number))
    digests = b"".join(digest_of(number) for number in numbers.values())
    rows.write(at, SPACE, digests, FIRST * len(at), checksum_rows(rows.buffer, at, PAGE))


def found_in(found: Recovered) -> dict[int, bytes]:
    return {int(row): found.digests[at].tobytes() for at, row in enumerate(found.rows)}


def accepted(rows: FileRows, page_bytes: int = PAGE) -> tuple[dict[int, bytes], RecoveryReport, list[int]]:
    """row -> digest of what is recovered and has its checksum, the report, and the rows that have not."""
    found = rows.recover()
    wrong = verify_rows(rows.buffer, found.rows, page_bytes, found.checksums)
    pages = {row: digest for row, digest in found_in(found).items() if row not in wrong}
    for row, digest in pages.items():
        assert bytes(rows.buffer[row * page_bytes : (row + 1) * page_bytes]) == content(digest, page_bytes)
    return pages, found.report, wrong


@contextlib.contextmanager
def opened(folder: Path, **changes: int) -> Iterator[FileRows]:
    rows = open_rows(folder, **changes)  # type: ignore[arg-type]
    try:
        yield rows
    finally:
        rows.close()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Files with page 100 + row in every row."""
    folder = tmp_path / "tier"
    with opened(folder) as rows:
        fill(rows, {row: 100 + row for row in range(PAGES)})
    return folder


ALL = {row: digest_of(100 + row) for row in range(PAGES)}


def test_rows_and_entries_survive_their_process(filled: Path) -> None:
    with opened(filled) as rows:
        assert accepted(rows) == (ALL, RecoveryReport(PAGES, {}), [])
        fill(rows, {3: 7})
        rows.clear([4])
    with opened(filled) as rows:
        pages, report, _ = accepted(rows)
        assert pages == {**{row: digest for row, digest in ALL.items() if row != 4}, 3: digest_of(7)}
        assert report == RecoveryReport(PAGES - 1, {})


def test_generations_grow_over_restarts(filled: Path) -> None:
    last = 0
    for number in range(3):
        with opened(filled) as rows:
            fill(rows, {5: number})
        with opened(filled) as rows:
            found = rows.recover()
            generation = int(found.generations[found.rows.tolist().index(5)])
            assert generation > last
            last = generation


def test_holes_of_a_copied_file_are_filled_as_its_rows_are_made(filled: Path) -> None:
    path = filled / "kvferry-host-decode.rows"
    half = PAGES * PAGE // 2
    os.truncate(path, half)
    os.truncate(path, PAGES * PAGE)
    with opened(filled) as rows:
        assert path.stat().st_blocks * 512 < PAGES * PAGE
        rows.make(0, PAGES * PAGE, ())
        assert path.stat().st_blocks * 512 >= PAGES * PAGE
        kept = {row: digest for row, digest in ALL.items() if row < PAGES // 2}
        lost = [row for row in range(PAGES) if row not in kept]
        assert accepted(rows) == (kept, RecoveryReport(PAGES, {}), lost)


def test_a_disk_without_room_for_the_index_is_an_error_at_once_and_costs_nothing(filled: Path) -> None:
    def disk(fd: int) -> int:
        return 1000

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "disk_room", disk)
        with pytest.raises(OSError, match=r"needs \d+ bytes more; the disk has 1000.*\.index") as caught:
            open_rows(filled, pages=1 << 20)
    assert caught.value.errno == errno.ENOSPC
    with opened(filled) as rows:
        assert accepted(rows)[0] == ALL


def test_a_disk_without_room_for_rows_says_what_they_lack(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file has already, of an earlier run that had come no further, needs no room."""
    room = 10 * PAGE
    monkeypatch.setattr(rows_module, "disk_room", lambda fd: room)
    with opened(filled, pages=64) as rows:
        rows.make(0, 16 * PAGE, ())
        there = (filled / "kvferry-host-decode.rows").stat().st_blocks * 512
        assert rows.lacks(0, there) == ""
        assert rows.lacks(there, there + room) == ""
        lack = rows.lacks(there, there + room + PAGE)
        assert lack == f"{11 * PAGE} bytes are wanted, the disk of {filled}/kvferry-host-decode.rows leaves {10 * PAGE}"
        room = 64 * PAGE
        assert rows.lacks(0, 64 * PAGE) == ""
        monkeypatch.setattr(rows_module, "disk_room", lambda fd: None)
        assert rows.lacks(0, 1 << 60) == "", "a disk without a limit"


def no_space(fd: int, offset: int, nbytes: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_allocation_of_rows_that_fails_leaves_what_was_there(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(filled, pages=100) as rows:
        rows.make(0, 64 * PAGE, ())
        monkeypatch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(OSError, match=r"cannot have 18432 bytes.*kvferry-host-decode\.rows"):
            rows.make(64 * PAGE, 100 * PAGE, ())
        assert accepted(rows) == (ALL, RecoveryReport(PAGES, {}), [])


def test_a_file_that_may_not_be_so_large_keeps_what_was_there(filled: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * PAGE, before[1]))
    try:
        for folder in (filled, tmp_path / "fresh"):
            with pytest.raises(OSError, match=r"cannot have 51200 bytes.*kvferry-host-decode\.rows"):
                open_rows(folder, pages=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    check_that_nothing_was_lost(filled, tmp_path / "fresh")


def test_an_allocation_of_the_index_that_fails_leaves_what_was_there(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    for folder in (filled, tmp_path / "fresh"):
        with pytest.raises(OSError, match=rf"cannot have {HEADER_BYTES + 100 * ENTRY_BYTES} bytes.*decode\.index"):
            open_rows(folder, pages=100)
    monkeypatch.undo()
    check_that_nothing_was_lost(filled, tmp_path / "fresh")


def check_that_nothing_was_lost(filled: Path, fresh: Path) -> None:
    assert [path.stat().st_size for path in fresh.iterdir()] == [0, 0]
    with opened(filled) as rows:
        assert accepted(rows) == (ALL, RecoveryReport(PAGES, {}), [])
    with opened(fresh) as rows:
        assert rows.recover().report == RecoveryReport(0, {})


def test_rows_are_recovered_part_by_part(tmp_path: Path) -> None:
    """What became of the file is told with the first; of a page that is twice in a part the younger is there."""
    with opened(tmp_path) as rows:
        fill(rows, {0: 1, 1: 2, 3: 3, 4: 4})
        fill(rows, {9: 9, 12: 9, 14: 1})
    with opened(tmp_path, pages=14) as rows:
        first = rows.recover(0, 4)
        assert found_in(first) == {0: digest_of(1), 1: digest_of(2), 3: digest_of(3)}
        assert first.report == RecoveryReport(3, {DropReason.PAGES_DIFFER: 1})
        assert found_in(rows.recover(4, 5)) == {4: digest_of(4)}
        second = rows.recover(5, 14)
        assert found_in(second) == {12: digest_of(9)}
        assert second.report == RecoveryReport(1, {DropReason.DUPLICATE: 1})
        assert rows.recover(6, 9).rows.tolist() == []
    with opened(tmp_path, pages=14) as rows:
        assert rows.recover().rows.tolist() == [0, 1, 3, 4, 12]


def test_fewer_pages_keep_what_fits_and_more_keep_all(filled: Path) -> None:
    with opened(filled, pages=10) as rows:
        assert len(rows.buffer) == 10 * PAGE
        kept = {row: digest for row, digest in ALL.items() if row < 10}
        assert accepted(rows) == (kept, RecoveryReport(10, {DropReason.PAGES_DIFFER: 6}), [])
    with opened(filled, pages=40) as rows:
        assert len(rows.buffer) == 40 * PAGE
        assert bytes(rows.buffer[10 * PAGE :]) == bytes(30 * PAGE)
        assert accepted(rows) == (kept, RecoveryReport(10, {}), [])
        fill(rows, {39: 1})
    with opened(filled, pages=40) as rows:
        assert accepted(rows)[0] == {**kept, 39: digest_of(1)}


def test_entries_that_a_killed_resize_left_do_not_come_back(filled: Path) -> None:
    index = filled / "kvferry-host-decode.index"
    whole = index.read_bytes()
    with opened(filled, pages=4) as rows:
        rows.recover()
    with index.open("r+b") as file:  # as after a kill between the header and the cut
        file.seek(HEADER_BYTES)
        file.write(whole[HEADER_BYTES:])
    with opened(filled) as rows:
        assert accepted(rows)[0] == {row: ALL[row] for row in range(4)}


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("changes", [{"pages": 4}, {"pages": 40}, {"page_bytes": 256}])
def test_a_resize_that_is_killed_at_any_step_leaves_right_entries(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    steps = kill = 0

    def stepped(call: Callable[..., int], *words: int) -> int:
        nonlocal steps
        if steps == kill:
            raise Killed
        steps += 1
        return call(*words)

    for kill in range(20):
        folder = tmp_path / f"kill-{kill}"
        shutil.copytree(filled, folder)
        steps = 0
        with monkeypatch.context() as patch:
            for name in ("ftruncate", "posix_fallocate", "pwrite"):
                patch.setattr(os, name, partial(stepped, getattr(os, name)))
            with contextlib.suppress(Killed):
                open_rows(folder, **changes).close()  # type: ignore[arg-type]
        for again in (changes, {}):
            page_bytes = again.get("page_bytes", PAGE)
            with opened(folder, **again) as rows:
                pages, _, wrong = accepted(rows, page_bytes)
                assert wrong == [] and pages.items() <= ALL.items()
                assert not (page_bytes != PAGE and pages)
        if steps < kill:
            break
    assert 5 <= steps < 19


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": b"k" * 32}, DropReason.LAYOUT_DIFFERS),
        ({"page_bytes": 256}, DropReason.PAGE_BYTES_DIFFERS),
        ({"page_bytes": 1024, "layout": b"k" * 32, "pages": 3}, DropReason.PAGE_BYTES_DIFFERS),
    ],
)
def test_files_of_other_rows_are_replaced(filled: Path, changes: dict[str, int], reason: DropReason) -> None:
    with opened(filled, **changes) as rows:
        assert rows.named(b"", 0).tolist() == [], "no entry names what the rows hold"
        assert rows.recover().report == RecoveryReport(0, {reason: PAGES}, reason)
        page_bytes = changes.get("page_bytes", PAGE)
        rows.buffer[:page_bytes] = content(digest_of(1), page_bytes)
        rows.write([0], SPACE, digest_of(1), FIRST, checksum_rows(rows.buffer, [0], page_bytes))
    with opened(filled, **changes) as rows:
        assert accepted(rows, page_bytes) == ({0: digest_of(1)}, RecoveryReport(1, {}), [])
        assert int(rows.recover().generations[0]) > PAGES  # they go on where the replaced file was


INDEX_BYTES = HEADER_BYTES + PAGES * ENTRY_BYTES


@pytest.mark.parametrize(
    ("name", "size", "found"),
    [
        ("rows", 0, PAGES),
        ("rows", 1, PAGES),
        ("rows", PAGES * PAGE - 1, PAGES),
        ("index", 0, 0),
        ("index", 1, 0),
        ("index", 79, 0),
        ("index", 80, 0),
        ("index", HEADER_BYTES - 1, 0),
        ("index", HEADER_BYTES, 0),
        ("index", HEADER_BYTES + ENTRY_BYTES - 1, 0),
        ("index", HEADER_BYTES + 3 * ENTRY_BYTES + 7, 3),
        ("index", INDEX_BYTES - 1, PAGES - 1),
    ],
)
def test_truncated_files_are_replaced(filled: Path, name: str, size: int, found: int) -> None:
    os.truncate(filled / f"kvferry-host-decode.{name}", size)
    with opened(filled) as rows:
        dropped = {DropReason.TRUNCATED: found} if found else {}
        assert rows.recover().report == RecoveryReport(0, dropped, DropReason.TRUNCATED)
        fill(rows, {2: 5})
    with opened(filled) as rows:
        assert accepted(rows) == ({2: digest_of(5)}, RecoveryReport(1, {}), [])


@pytest.mark.parametrize("name", ["rows", "index"])
def test_a_missing_file_of_the_two_is_a_miss(filled: Path, name: str) -> None:
    (filled / f"kvferry-host-decode.{name}").unlink()
    with opened(filled) as rows:
        assert accepted(rows)[0] == {}
        assert rows.recover().report.replaced is DropReason.TRUNCATED


def test_foreign_files_are_replaced(tmp_path: Path) -> None:
    chance = random.Random(1)
    for size in (HEADER_BYTES, INDEX_BYTES, 100_000):
        for name in ("rows", "index"):
            (tmp_path / f"kvferry-host-decode.{name}").write_bytes(chance.randbytes(size))
        with opened(tmp_path) as rows:
            assert rows.recover().report == RecoveryReport(0, {}, DropReason.BAD_HEADER)
            fill(rows, {1: 1})


def test_files_that_are_longer_are_cut(filled: Path) -> None:
    for path in filled.iterdir():
        with path.open("ab") as file:
            file.write(b"x" * 10_000)
    with opened(filled) as rows:
        assert accepted(rows) == (ALL, RecoveryReport(PAGES, {}), [])
    assert {path.stat().st_size for path in filled.iterdir()} == {PAGES * PAGE, INDEX_BYTES}


def test_an_index_with_the_rows_of_another_gives_no_wrong_page(filled: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "other") as rows:
        fill(rows, {row: row for row in range(PAGES)} | {5: 105})
    shutil.copy(tmp_path / "other" / "kvferry-host-decode.rows", filled)
    with opened(filled) as rows:
        pages, _, wrong = accepted(rows)
        assert pages == {5: ALL[5]}
        assert len(wrong) == PAGES - 1


EXTENTS = {"rows": (0, PAGES * PAGE), "header": (0, 80), "entries": (HEADER_BYTES, PAGES * ENTRY_BYTES)}


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(EXTENTS)), st.floats(0, 1, exclude_max=True), st.integers(1, 255)),
        min_size=1,
        max_size=12,
    )
)
def test_flipped_bits_are_misses(
    tmp_path_factory: pytest.TempPathFactory, damages: list[tuple[str, float, int]]
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    with opened(folder) as rows:
        fill(rows, {row: 100 + row for row in range(PAGES)})
    for where, place, flip in damages:
        start, length = EXTENTS[where]
        at = start + int(place * length)
        with (folder / f"kvferry-host-decode.{'rows' if where == 'rows' else 'index'}").open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ flip]))
    with opened(folder) as rows:
        pages, report, wrong = accepted(rows)
        assert pages.items() <= ALL.items()
        assert report.entries_found <= PAGES
        assert report.entries_valid == len(pages) + len(wrong)
        if report.replaced is None:
            assert len(pages) >= PAGES - len(damages)
        else:
            assert report.replaced is DropReason.BAD_HEADER
            assert pages == {}
        fill(rows, {row: row for row in range(PAGES)})
    with opened(folder) as rows:
        assert len(accepted(rows)[0]) == PAGES
    shutil.rmtree(folder)


def test_a_killed_writer_leaves_right_entries_or_none(tmp_path: Path) -> None:
    pages, page_bytes = 64, 16384
    chance = random.Random(11)
    before: set[int] = set()  # generations; only a writer that lived long enough added some
    seen = 0
    for round_number in range(7):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(round_number)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "open\n"
            time.sleep(chance.uniform(0.002, 0.06))
            writer.kill()
            writer.wait(30)
        with opened(tmp_path, pages=pages, page_bytes=page_bytes) as rows:
            found, report, wrong = accepted(rows, page_bytes)
            assert report == RecoveryReport(len(found), {})  # not even one that is torn
            assert wrong == []
            now = {int(generation) for generation in rows.recover().generations}
            seen += len(now - before)
            assert min(now - before, default=1 << 64) > max(before, default=0)
            before |= now
    assert seen > 0
