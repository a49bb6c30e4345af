"""The host tier's index: what is written is recovered, and what is damaged, foreign or older is not."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from kvferry.transfer.geometry.kv_geometry import CacheShape, KVGeometry, Layout
from kvferry.transfer.host_tier.index import (
    DIGEST_BYTES,
    ENTRY,
    ENTRY_BYTES,
    IN_USE,
    MAX_PAGES,
    OUTPUT_PAGE,
    DropReason,
    Header,
    Recovered,
    RecoveryReport,
    RowIndex,
    layout_fingerprint,
)

LAYOUT = bytes(range(DIGEST_BYTES))
SPACE, OTHER_SPACE = b"n" * DIGEST_BYTES, b"m" * DIGEST_BYTES
FIRST = bytes(DIGEST_BYTES)  # parent of a prompt's first page
GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8, dtype="float16", page_size=16)


def digest(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


class Memory:
    """An index in memory, and what its header was set to."""

    def __init__(self, pages: int = 8) -> None:
        self.entries = np.zeros(pages, ENTRY)
        self.headers = [Header(64, pages, LAYOUT)]
        self.index = self.reopen()

    def reopen(self) -> RowIndex:
        self.index = RowIndex(self.entries, self.headers[-1], self.headers.append)
        return self.index

    def write(self, row: int, number: int, space: bytes = SPACE) -> None:
        self.index.write([row], space, digest(number), FIRST, np.array([number], np.uint64))

    @property
    def bytes(self) -> NDArray[np.uint8]:
        return self.entries.view(np.uint8)


def pages_of(found: Recovered) -> dict[int, bytes]:
    return {int(row): found.digests[at].tobytes() for at, row in enumerate(found.rows)}


def test_what_is_written_is_recovered() -> None:
    memory = Memory()
    rows = np.array([5, 0, 3])
    digests, parents = digest(1) + digest(2) + digest(3), FIRST + digest(1) + digest(2)
    sums = np.array([7, 8, (1 << 64) - 1], np.uint64)
    memory.index.write(rows, SPACE, digests, parents, sums, np.array([OUTPUT_PAGE, 0, 6], np.uint32))
    memory.index.write([7], OTHER_SPACE, digest(1), FIRST, np.array([9], np.uint64), (1 << 32) - 1)
    memory.index.write([], SPACE, b"", b"", np.zeros(0, np.uint64))
    found = memory.reopen().recover()
    assert found.rows.tolist() == [0, 3, 5, 7]
    assert [part.tobytes() for part in found.digests] == [digest(2), digest(3), digest(1), digest(1)]
    assert [part.tobytes() for part in found.parents] == [digest(1), digest(2), FIRST, FIRST]
    assert [part.tobytes() for part in found.namespace_ids] == [SPACE, SPACE, SPACE, OTHER_SPACE]
    assert found.checksums.tolist() == [8, (1 << 64) - 1, 7, 9]
    assert found.flags.tolist() == [0, 6, OUTPUT_PAGE, (1 << 32) - 1]
    assert found.generations.tolist() == [2, 3, 1, 4]
    for array, dtype in (
        (found.rows, np.int64),
        (found.digests, np.uint8),
        (found.generations, np.uint64),
        (found.checksums, np.uint64),
        (found.flags, np.uint32),
    ):
        assert array.dtype == dtype
        assert array.dtype.isnative
    assert found.report == RecoveryReport(4, {})
    assert found.report.entries_found == 4


def test_an_empty_index_gives_empty_arrays_of_the_right_shapes() -> None:
    found = Memory().index.recover()
    assert (found.rows.shape, found.digests.shape, found.flags.shape) == ((0,), (0, 32), (0,))
    assert found.report == RecoveryReport(0, {})


def test_the_format_does_not_change_by_accident() -> None:
    memory = Memory(2)
    memory.index.write([1], SPACE, digest(1), digest(2), np.array([0x0102030405060708], np.uint64), OUTPUT_PAGE)
    entry = memory.entries[1].tobytes()
    assert ENTRY_BYTES == 128
    body = IN_USE.to_bytes(4, "little") + bytes([1, 0, 0, 0]) + bytes([1, 0, 0, 0, 0, 0, 0, 0])
    body += bytes([8, 7, 6, 5, 4, 3, 2, 1]) + SPACE + digest(1) + digest(2)
    assert entry == body + xxhash.xxh3_64_intdigest(body, 1).to_bytes(8, "little")
    header = Header(page_bytes=4096, pages=3, layout=LAYOUT, generations=9).encode()
    fields = b"KVFHOST1" + bytes([1, 0, 0, 0, 128, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0])
    fields += LAYOUT + bytes([9, 0, 0, 0, 0, 0, 0, 0])
    assert header == fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")


def test_cleared_rows_are_gone_and_can_be_written_again() -> None:
    memory = Memory()
    for row in range(4):
        memory.write(row, row)
    memory.index.clear(np.array([1, 3]))
    memory.index.clear([3, 7, 3])
    memory.index.clear([])
    assert memory.reopen().recover().rows.tolist() == [0, 2]
    memory.write(3, 33)
    assert pages_of(memory.reopen().recover()) == {0: digest(0), 2: digest(2), 3: digest(33)}


def test_a_state_that_comes_back_does_not_bring_a_cleared_entry_back() -> None:
    memory = Memory()
    memory.write(2, 1)
    memory.index.clear([2])
    memory.entries["state"][2] = IN_USE
    assert memory.index.recover().report == RecoveryReport(0, {DropReason.BAD_ENTRY: 1})


def test_arguments_that_do_not_fit_are_named_and_change_nothing() -> None:
    memory = Memory()
    memory.write(4, 4)
    before = memory.entries.tobytes()
    one = np.zeros(1, np.uint64)
    write = memory.index.write
    with pytest.raises(ValueError, match="namespace_id has 31 bytes; it must have 32"):
        write([0], SPACE[1:], digest(0), FIRST, one)
    with pytest.raises(ValueError, match="digests has 32 bytes; it must have 64"):
        write([0, 1], SPACE, digest(0), FIRST * 2, np.zeros(2, np.uint64))
    with pytest.raises(ValueError, match="parents has 0 bytes; it must have 32"):
        write([0], SPACE, digest(0), b"", one)
    with pytest.raises(ValueError, match="checksums has shape"):
        write([0], SPACE, digest(0), FIRST, np.zeros(2, np.uint64))
    with pytest.raises(ValueError, match="flags is 4294967296"):
        write([0], SPACE, digest(0), FIRST, one, 1 << 32)
    with pytest.raises(ValueError, match="flags has shape"):
        write([0], SPACE, digest(0), FIRST, one, np.zeros(3, np.uint32))
    with pytest.raises(ValueError, match="rows has 2 rows, 1 of them distinct"):
        write([1, 1], SPACE, digest(0) * 2, FIRST * 2, np.zeros(2, np.uint64))
    with pytest.raises(ValueError, match="row 4 has an entry; it must be cleared"):
        write([4], SPACE, digest(0), FIRST, one)
    for row in (-1, 8):
        with pytest.raises(ValueError, match=f"row {row} is not there; rows are 0 to 7"):
            write([row], SPACE, digest(0), FIRST, one)
        with pytest.raises(ValueError, match=f"row {row} is not there"):
            memory.index.clear([0, row])
    with pytest.raises(ValueError, match="rows has 2 dimensions"):
        memory.index.clear(np.zeros((1, 1), np.int64))
    assert memory.entries.tobytes() == before


def test_generations_grow_over_restarts_and_are_reserved_before_they_are_used() -> None:
    memory = Memory()
    last = 0
    for number in range(6):
        memory.index.clear([3])
        memory.write(3, number)
        reopened = memory.reopen()
        generation = int(reopened.recover().generations[0])
        assert last < generation < memory.headers[-2].generations
        last = generation


def test_a_new_reservation_comes_before_the_old_one_is_used_up() -> None:
    memory = Memory()
    memory.index._next = memory.headers[-1].generations - 1
    memory.index.write([0, 1], SPACE, digest(0) + digest(1), FIRST * 2, np.zeros(2, np.uint64))
    assert memory.headers[-1].generations > int(memory.entries["generation"].max())
    assert memory.reopen().recover().rows.tolist() == [0, 1]


def test_a_generation_that_nobody_gave_out_is_a_bad_entry() -> None:
    memory = Memory()
    memory.write(0, 0)
    memory.headers.append(Header(64, 8, LAYOUT))  # as of a header from before
    assert memory.reopen().recover().report == RecoveryReport(0, {DropReason.BAD_ENTRY: 1})


def test_of_a_page_that_is_there_twice_the_younger_stays() -> None:
    memory = Memory()
    memory.write(1, 7)
    memory.write(6, 7)
    memory.write(0, 8)
    memory.write(2, 7, OTHER_SPACE)  # another page: its namespace differs
    memory.index.clear([1])
    memory.write(1, 7)  # now younger than row 6
    memory.write(5, 7, OTHER_SPACE)
    memory.write(7, 7)
    found = memory.reopen().recover()
    assert found.rows.tolist() == [0, 5, 7]
    assert found.report == RecoveryReport(3, {DropReason.DUPLICATE: 3})
    assert memory.index.recover().report == RecoveryReport(3, {})  # they were cleared


def test_a_damaged_duplicate_does_not_win() -> None:
    memory = Memory()
    memory.write(1, 7)
    memory.write(6, 7)
    memory.entries["generation"][6] += 1
    found = memory.reopen().recover()
    assert found.rows.tolist() == [1]
    assert found.report == RecoveryReport(1, {DropReason.BAD_ENTRY: 1})


def test_digests_that_share_their_first_bytes_are_not_duplicates() -> None:
    memory = Memory()
    for row in range(4):
        memory.index.write([row], SPACE, digest(0)[:31] + bytes([row]), FIRST, np.zeros(1, np.uint64))
    assert memory.index.recover().rows.tolist() == [0, 1, 2, 3]


def test_an_entry_of_another_row_is_a_miss() -> None:
    memory = Memory()
    memory.write(2, 2)
    memory.entries[5] = memory.entries[2]
    found = memory.reopen().recover()
    assert pages_of(found) == {2: digest(2)}
    assert found.report.dropped == {DropReason.BAD_ENTRY: 1}


def test_every_bit_of_an_entry_is_covered() -> None:
    memory = Memory(1)
    memory.write(0, 1)
    whole = memory.entries.tobytes()
    for bit in range(8 * ENTRY_BYTES):
        memory.bytes[:] = np.frombuffer(whole, np.uint8)
        memory.bytes[bit // 8] ^= 1 << bit % 8
        assert memory.index.recover().report == RecoveryReport(0, {DropReason.BAD_ENTRY: 1})
        assert memory.entries["state"][0] == 0


def test_an_entry_that_is_half_an_other_is_neither() -> None:
    """Whatever the order in which a copy that was cut off went."""
    memory = Memory(1)
    memory.write(0, 1)
    old = memory.entries.tobytes()
    memory.index.clear([0])
    cleared = memory.entries.tobytes()
    memory.write(0, 2)
    new = memory.entries.tobytes()
    chance = random.Random(5)
    for before in (old, cleared, bytes(ENTRY_BYTES)):
        cuts = [[place < cut for place in range(ENTRY_BYTES)] for cut in range(ENTRY_BYTES + 1)]
        cuts += [[not done for done in cut] for cut in cuts]
        cuts += [[word for _ in range(16) for word in [chance.random() < 0.5] * 8] for _ in range(200)]
        for cut in cuts:
            torn = bytes(new[place] if done else before[place] for place, done in enumerate(cut))
            memory.bytes[:] = np.frombuffer(torn, np.uint8)
            found = pages_of(memory.index.recover())
            assert found == {new: {0: digest(2)}, old: {0: digest(1)}}.get(torn, {})


def test_many_entries_are_recovered_over_the_chunks() -> None:
    count = 70_000
    memory = Memory(count)
    chance = np.random.default_rng(3)
    digests = chance.integers(0, 256, (count, DIGEST_BYTES), np.uint8)
    digests[60_000] = digests[5]
    memory.index.write(
        np.arange(count), SPACE, digests.tobytes(), bytes(DIGEST_BYTES * count), np.arange(count, dtype=np.uint64)
    )
    memory.bytes[ENTRY_BYTES * 69_000 + 50] ^= 1
    found = memory.reopen().recover()
    rows = np.delete(np.arange(count), [5, 69_000])
    assert np.array_equal(found.rows, rows)
    assert np.array_equal(found.digests, digests[rows])
    assert found.report.dropped == {DropReason.BAD_ENTRY: 1, DropReason.DUPLICATE: 1}
    assert found.report.entries_found == count


def test_after_close_there_are_no_rows() -> None:
    memory = Memory()
    memory.index.close()
    memory.index.close()
    with pytest.raises(ValueError, match="row 0 is not there"):
        memory.index.clear([0])


def test_headers_come_back_and_damaged_ones_do_not() -> None:
    header = Header(page_bytes=4096, pages=3, layout=LAYOUT, generations=9)
    data = header.encode()
    assert Header.decode(data) == header
    assert Header.decode(data + bytes(4000)) == header
    for length in range(len(data)):
        assert Header.decode(data[:length]) is None
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert Header.decode(bytes(damaged)) is None
    assert Header.decode(dataclasses.replace(header, generations=(1 << 63) + 1).encode()) is None


@pytest.mark.parametrize(
    ("offset", "value"), [(0, b"KVFHOST2"), (8, b"\2"), (12, b"\x7f"), (16, bytes(8)), (24, bytes(8))]
)
def test_headers_of_others_are_not_taken(offset: int, value: bytes) -> None:
    """Magic, version, size of an entry, page_bytes 0, pages 0: each with a checksum that fits."""
    fields = bytearray(Header(4096, 3, LAYOUT).encode()[:-8])
    fields[offset : offset + len(value)] = value
    assert Header.decode(bytes(fields) + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")) is None


def test_header_bounds_are_named() -> None:
    with pytest.raises(ValueError, match="page_bytes is 0; it must be 1 to"):
        Header(0, 1, LAYOUT)
    with pytest.raises(ValueError, match=f"pages is {MAX_PAGES + 1}; it must be 1 to {MAX_PAGES}"):
        Header(1, MAX_PAGES + 1, LAYOUT)
    with pytest.raises(ValueError, match="layout has 3 bytes; it must have 32"):
        Header(1, 1, b"abc")


def test_the_fingerprint_tells_every_field() -> None:
    others = [
        dataclasses.replace(GEOMETRY, **change)
        for change in (
            {"layers": 3},
            {"kv_heads": 4},
            {"head_dim": 16},
            {"dtype": "bfloat16"},
            {"page_size": 32},
            {"layout": Layout.PAGE_HND},
            {"tensors": 1},
            {"further": (CacheShape(3, 1, 132, "uint8", 1),)},
        )
    ]
    assert len(others) == len([field for field in dataclasses.fields(GEOMETRY) if field.compare])
    prints = [layout_fingerprint(geometry) for geometry in (GEOMETRY, *others)]
    assert len(set(prints)) == len(prints)
    assert {len(made) for made in prints} == {DIGEST_BYTES}
    assert layout_fingerprint(dataclasses.replace(GEOMETRY)) == layout_fingerprint(GEOMETRY, 1) == prints[0]
    assert len({layout_fingerprint(GEOMETRY, shards) for shards in (1, 2, 4)}) == 3
    own = dataclasses.replace(GEOMETRY, layout=Layout.ENGINE)
    assert layout_fingerprint(own) == layout_fingerprint(dataclasses.replace(own, head_runs=1)), "the rows are the same"
