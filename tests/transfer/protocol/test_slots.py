"""The slot protocol: headers, notifications, credits, and the intervals of coverage."""

from __future__ import annotations

import ast
import importlib.util
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transfer.protocol.coverage import Coverage, IntervalSet
from kvferry.transfer.protocol.slots import (
    HEADER_BYTES,
    NOTICE_BYTES,
    Credit,
    CreditPurse,
    CreditTable,
    PartHeader,
    PartNotice,
    SlotError,
    SlotState,
)

U16, U32, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1

headers = st.builds(
    PartHeader,
    epoch=st.integers(0, U64),
    transfer=st.integers(0, U64),
    slot=st.integers(0, U32),
    generation=st.integers(0, U64),
    lane=st.integers(0, U16),
    first_page=st.integers(0, U32),
    byte_offset=st.integers(0, U64),
    nbytes=st.integers(0, U64),
    checksum=st.integers(0, U64),
)
HEADER = PartHeader(
    epoch=1, transfer=2, slot=3, generation=4, lane=5, first_page=6, byte_offset=7, nbytes=8, checksum=9
)


@pytest.mark.parametrize("module", ["slots", "coverage", "outgoing", "sender", "receiver", "credit_groups"])
def test_cores_do_no_io(module: str) -> None:
    spec = importlib.util.find_spec(f"kvferry.transfer.protocol.{module}")
    assert spec is not None
    assert spec.origin is not None
    allowed = {"__future__", "bisect", "collections", "dataclasses", "enum", "kvferry", "struct", "typing"}
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert {name.split(".")[0] for name in names} <= allowed


@given(headers)
def test_header_round_trip(header: PartHeader) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert PartHeader.unpack(packed) == header
    assert PartHeader.unpack(memoryview(packed + b"payload")) == header


@given(st.integers(0, U64), st.integers(0, U64), st.integers(0, U32), st.integers(0, U64))
def test_notification_round_trip(epoch: int, transfer: int, slot: int, generation: int) -> None:
    notice = PartNotice(epoch=epoch, transfer=transfer, slot=slot, generation=generation)
    packed = notice.pack()
    assert len(packed) == NOTICE_BYTES
    assert PartNotice.unpack(packed) == notice


@given(st.binary(max_size=80))
def test_other_bytes_are_refused_by_field(payload: bytes) -> None:
    for unpack in (PartHeader.unpack, PartNotice.unpack):
        with pytest.raises(SlotError, match=r"(part|notification)\.(length|magic|version) is"):
            unpack(payload)


def test_header_errors_name_the_field() -> None:
    packed = bytearray(HEADER.pack())
    with pytest.raises(SlotError, match=r"part\.length is 63 bytes, must be at least 64"):
        PartHeader.unpack(packed[:63])
    packed[0] ^= 1
    with pytest.raises(SlotError, match=r"part\.magic is 0x5046564a, must be 0x5046564b"):
        PartHeader.unpack(packed)
    packed[0] ^= 1
    packed[4] = 9
    with pytest.raises(SlotError, match=r"part\.version is 9, must be 1"):
        PartHeader.unpack(packed)
    with pytest.raises(SlotError, match=r"notification\.length is 31 bytes, must be 32"):
        PartNotice.unpack(bytes(31))
    with pytest.raises(SlotError, match=r"notification\.magic"):
        PartNotice.unpack(bytes(32))


@pytest.mark.parametrize(
    ("field", "bits"),
    [("lane", 16), ("slot", 32), ("first_page", 32)]
    + [(field, 64) for field in ("epoch", "transfer", "generation", "byte_offset", "nbytes", "checksum")],
)
def test_header_fields_have_bounds(field: str, bits: int) -> None:
    HEADER._replace(**{field: (1 << bits) - 1}).pack()
    for value in (1 << bits, -1):
        with pytest.raises(SlotError, match=rf"part\.{field} is {value}, must be in 0\.\.2\^{bits}-1"):
            HEADER._replace(**{field: value}).pack()


def test_credit_table_goes_round() -> None:
    table = CreditTable(2)
    assert table.granted == 0
    assert [table.grant(0), table.grant(1)] == [Credit(0, 1), Credit(1, 1)]
    assert table.granted == 2
    assert table.take(0, 1)
    assert table.state(0) is SlotState.TAKEN
    assert not table.take(0, 1), "taken once"
    assert table.give_back(0) == Credit(0, 2)
    assert not table.take(0, 1), "an old generation"
    assert not table.take(0, 3), "one never granted"
    assert table.take(0, 2)
    table.withhold(0)
    assert not table.take(0, 2)
    assert table.granted == 1
    table.check()


def test_credit_table_asserts_its_states() -> None:
    table = CreditTable(1)
    assert not table.take(0, 0), "never granted"
    with pytest.raises(AssertionError, match="slot 0 is free, must be taken"):
        table.give_back(0)
    table.grant(0)
    with pytest.raises(AssertionError, match="slot 0 is granted, must be free"):
        table.grant(0)
    with pytest.raises(AssertionError, match="slot 0 is granted, must be taken"):
        table.withhold(0)


@pytest.mark.parametrize("slots", [0, -1, (1 << 16) + 1])
def test_number_of_slots_has_bounds(slots: int) -> None:
    for table in (CreditTable, CreditPurse):
        with pytest.raises(ValueError, match=rf"slots is {slots}, must be in 1\.\.65536"):
            table(slots)


def test_purse_spends_the_oldest_first_and_takes_back() -> None:
    purse = CreditPurse(3)
    purse.add([Credit(2, 1), Credit(0, 1)])
    first = purse.take()
    assert first == Credit(2, 1)
    assert len(purse) == 1
    purse.put_back(first)
    assert purse.held() == (Credit(2, 1), Credit(0, 1))


def test_purse_refuses_what_cannot_be_a_credit() -> None:
    purse = CreditPurse(2)
    purse.add([Credit(0, 5)])
    with pytest.raises(SlotError, match=r"credit\.slot is 2, must be in 0\.\.1"):
        purse.add([Credit(2, 1)])
    with pytest.raises(SlotError, match=r"credit\.generation is 5, must be greater than 5 for slot 0"):
        purse.add([Credit(0, 5)])
    purse.take()
    with pytest.raises(SlotError, match=r"credit\.generation is 5"):
        purse.add([Credit(0, 5)])
    with pytest.raises(SlotError, match=r"credit\.generation is 0, must be greater than 0 for slot 1"):
        purse.add([Credit(1, 0)])
    with pytest.raises(SlotError, match=r"credit\.generation is \d+, must be in 0\.\.2\^64-1"):
        purse.add([Credit(1, 1 << 64)])
    assert len(purse) == 0


def test_purse_refuses_a_slot_whose_credit_is_unspent() -> None:
    purse = CreditPurse(2)
    purse.add([Credit(0, 1)])
    refused = r"credit\.slot is 0, must be a slot whose former credit was spent"
    with pytest.raises(SlotError, match=refused):
        purse.add([Credit(0, 2)])
    credit = purse.take()
    with pytest.raises(SlotError, match=refused):
        purse.add([Credit(0, 3)])
    purse.check([credit])
    purse.put_back(credit)
    with pytest.raises(SlotError, match=refused):
        purse.add([Credit(0, 4)])
    purse.spend(purse.take())
    purse.add([Credit(0, 5)])
    assert purse.held() == (Credit(0, 5),)
    purse.check([])


def test_purse_asserts_that_a_credit_is_spent_once() -> None:
    purse = CreditPurse(1)
    purse.add([Credit(0, 1)])
    credit = purse.take()
    purse.spend(credit)
    with pytest.raises(AssertionError, match="spent twice"):
        purse.spend(credit)
    with pytest.raises(AssertionError, match="was spent"):
        purse.put_back(credit)


ranges = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(ranges, max_size=20), ranges)
def test_interval_set_is_a_set(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    intervals, model = IntervalSet(), set[int]()
    for start, end in added:
        counted = intervals.count_with(start, end)
        intervals.add(start, end)
        assert len(intervals) == counted
        model |= set(range(start, end))
        found = intervals.intervals()
        assert {i for low, high in found for i in range(low, high)} == model
        assert all(high < low for (_, high), (low, _) in pairwise(found)), "merged and sorted"
    wanted = set(range(*asked))
    assert intervals.overlaps(*asked) == bool(wanted & model)
    assert intervals.contains(*asked) == (wanted <= model)
    assert all(i in range(*intervals.around(i)) for i in model)
    assert len(intervals) == len(intervals.intervals())


def test_coverage_reports_a_page_once_and_only_whole() -> None:
    coverage = Coverage(pages=3, page_bytes=10)
    for start, nbytes, pages in [(5, 10, []), (25, 5, []), (0, 5, [0]), (15, 10, [1, 2])]:
        assert not coverage.overlaps(start, nbytes)
        coverage.claim(start, nbytes)
        assert coverage.overlaps(start, nbytes)
        assert not coverage.complete
        assert coverage.written(start, nbytes) == pages
    assert coverage.complete
    assert coverage.written(0, 30) == []


def test_coverage_counts_what_is_written_not_what_is_claimed() -> None:
    coverage = Coverage(pages=1, page_bytes=10)
    coverage.claim(0, 5)
    coverage.claim(5, 5)
    assert coverage.written(5, 5) == []
    assert not coverage.covered(5, 5)
    assert coverage.written(0, 5) == [0]
    assert coverage.covered(5, 5) == range(1)


def test_coverage_asserts_its_callers() -> None:
    coverage = Coverage(pages=1, page_bytes=10)
    with pytest.raises(AssertionError):
        coverage.written(0, 5)
    with pytest.raises(AssertionError):
        coverage.claim(5, 6)
    with pytest.raises(ValueError, match="pages is 0"):
        Coverage(pages=0, page_bytes=10)
