"""The index of a host tier's file, which survives the daemon: the page of KV that stands in each row.

The index is a header of `HEADER_BYTES` and then one entry of `ENTRY_BYTES` for each row, little endian. An entry counts
only where its checksum fits, and that is seeded with the row: bytes that were damaged, or belong to another row, are a
miss.

Order, for a process that may be killed at any instruction: an entry is cleared before its row is overwritten; after the
row's bytes are in place all of the entry but its state is written, and the state last. So an entry that is there names
the bytes that are in its row. Power loss is out of scope: the kernel writes back in any order; the checksums make most
of what that leaves a miss, and nothing is synchronised for it.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.transfer.geometry.kv_geometry import MAX_PAGE_BYTES, KVGeometry

DIGEST_BYTES = 32
MAX_PAGES = 1 << 28
HEADER_BYTES = 4096  # entries start on a page of memory
OUTPUT_PAGE = 1  # flag: the page holds tokens that were generated

ENTRY = np.dtype(
    [
        ("state", "<u4"),  # IN_USE, or 0
        ("flags", "<u4"),
        ("generation", "<u8"),
        ("checksum", "<u8"),  # of the row's bytes
        ("namespace_id", "u1", (DIGEST_BYTES,)),
        ("digest", "u1", (DIGEST_BYTES,)),
        ("parent", "u1", (DIGEST_BYTES,)),  # zeros for a prompt's first page
        ("entry_checksum", "<u8"),  # XXH3 of all before it, seeded with the row
    ]
)
ENTRY_BYTES = ENTRY.itemsize
IN_USE = 0x4567F3A9

_MAGIC = b"KVFHOST1"
_VERSION = 1
_FIELDS = struct.Struct("<8sIIQQ32sQ")
_CHECKSUM = struct.Struct("<Q")
_GENERATIONS = 1 << 32  # reserved at a time, so that the header is seldom written
_MAX_GENERATION = 1 << 63  # of a header that is read: what is left is enough for any process
_CHUNK = 1 << 16  # entries checked at a time

Rows = Sequence[int] | NDArray[np.int64]


class DropReason(enum.Enum):
    """The reasons for which entries were dropped. The first four concern the whole file, which is then replaced by a
    fresh one."""

    BAD_HEADER = "bad_header"
    PAGE_BYTES_DIFFERS = "page_bytes_differs"
    LAYOUT_DIFFERS = "layout_differs"
    TRUNCATED = "truncated"
    PAGES_DIFFER = "pages_differ"  # in rows that the tier no longer has
    BAD_ENTRY = "bad_entry"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """The fate of the entries of the file that was found."""

    entries_valid: int
    dropped: Mapping[DropReason, int]  # entries; only the reasons that occurred
    replaced: DropReason | None = None  # the files are fresh ones, for this reason

    @property
    def entries_found(self) -> int:
        """Entries in use. Those behind a bad header are not known, and not counted."""
        return self.entries_valid + sum(self.dropped.values())


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """The n valid entries, in the order of their rows; each (namespace, digest) once. Arrays are the caller's own."""

    rows: NDArray[np.int64]  # (n,)
    namespace_ids: NDArray[np.uint8]  # (n, 32)
    digests: NDArray[np.uint8]  # (n, 32)
    parents: NDArray[np.uint8]  # (n, 32)
    generations: NDArray[np.uint64]  # (n,)
    checksums: NDArray[np.uint64]  # (n,) of the rows' bytes, which nobody has looked at yet
    flags: NDArray[np.uint32]  # (n,)
    report: RecoveryReport


@dataclass(frozen=True, slots=True)
class Header:
    """The facts for which the entries were written."""

    page_bytes: int
    pages: int
    layout: bytes  # fingerprint
    generations: int = 1  # all that were ever given out are below it

    def __post_init__(self) -> None:
        """ValueError names the field, its value and the bound."""
        bounds = (
            ("page_bytes", self.page_bytes, 1, MAX_PAGE_BYTES),
            ("pages", self.pages, 1, MAX_PAGES),
            ("generations", self.generations, 1, (1 << 64) - 1),
        )
        for name, value, low, high in bounds:
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must be {low} to {high}")
        if len(self.layout) != DIGEST_BYTES:
            raise ValueError(f"layout has {len(self.layout)} bytes; it must have {DIGEST_BYTES}")

    @property
    def index_bytes(self) -> int:
        return HEADER_BYTES + self.pages * ENTRY_BYTES

    @property
    def rows_bytes(self) -> int:
        return self.pages * self.page_bytes

    def encode(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, _VERSION, ENTRY_BYTES, self.page_bytes, self.pages, self.layout, self.generations)
        return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))

    @staticmethod
    def decode(data: bytes) -> Header | None:
        """Reads the first bytes of a file; None where they are no header of this version."""
        if len(data) < _FIELDS.size + _CHECKSUM.size:
            return None
        (checksum,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
        if checksum != xxhash.xxh3_64_intdigest(data[: _FIELDS.size]):
            return None
        magic, version, entry_bytes, page_bytes, pages, layout, generations = _FIELDS.unpack_from(data)
        if (magic, version, entry_bytes) != (_MAGIC, _VERSION, ENTRY_BYTES) or generations > _MAX_GENERATION:
            return None
        try:
            return Header(page_bytes, pages, layout, generations)
        except ValueError:
            return None


class RowIndex:
    """The entries of one file. Of one row's entry one thread at a time does anything; one at a time writes.

    A generation is a number that no write of any row had before, over restarts too: greater is younger, also between
    rows. Numbers are reserved in the header, many at a time, before the first of them is used.
    """

    def __init__(self, entries: NDArray[np.void], header: Header, store: Callable[[Header], None]) -> None:
        """`entries`: (pages,) of ENTRY, written in place. `store` writes the header; its OSError passes through."""
        self._entries = entries
        self._header = header
        self._store = store
        self._next = header.generations
        self._reserve(0)

    def clear(self, rows: Rows) -> None:
        """Clears entries, before their rows' bytes are overwritten. ValueError for rows that are not there; clearing
        twice is no harm."""
        at = as_rows(rows, len(self._entries))
        self._entries["state"][at] = 0
        self._entries["entry_checksum"][at] = 0

    def write(
        self,
        rows: Rows,
        namespace_id: bytes,
        digests: bytes,
        parents: bytes,
        checksums: NDArray[np.uint64],
        flags: int | NDArray[np.uint32] = 0,
    ) -> None:
        """Writes entries, after the bytes of the n rows are in place.

        digests, parents: 32 * n bytes. checksums: (n,), of the rows' bytes. flags: one for all, or (n,).
        ValueError where a length differs, a row is not there, comes twice, or still has an entry; nothing is written.
        """
        at = as_rows(rows, len(self._entries))
        count = len(at)
        for name, length, wanted in (
            ("namespace_id", len(namespace_id), DIGEST_BYTES),
            ("digests", len(digests), DIGEST_BYTES * count),
            ("parents", len(parents), DIGEST_BYTES * count),
        ):
            if length != wanted:
                raise ValueError(f"{name} has {length} bytes; it must have {wanted}")
        if checksums.shape != (count,):
            raise ValueError(f"checksums has shape {checksums.shape}; it must be ({count},)")
        if isinstance(flags, int):
            if not 0 <= flags < 1 << 32:
                raise ValueError(f"flags is {flags}; it must be 0 to {(1 << 32) - 1}")
        elif flags.shape != (count,):
            raise ValueError(f"flags has shape {flags.shape}; it must be ({count},)")
        distinct = len(set(at.tolist()))
        if distinct != count:
            raise ValueError(f"rows has {count} rows, {distinct} of them distinct; each may come once")
        live = at[self._entries["state"][at] != 0]
        if len(live):
            raise ValueError(f"row {live[0]} has an entry; it must be cleared before its bytes are overwritten")
        if count == 0:
            return
        if self._next + count > self._header.generations:
            self._reserve(count)
        batch = np.zeros(count, ENTRY)
        batch["state"] = IN_USE
        batch["flags"] = flags
        batch["generation"] = np.arange(self._next, self._next + count, dtype=np.uint64)
        batch["checksum"] = checksums
        batch["namespace_id"] = np.frombuffer(namespace_id, np.uint8)
        batch["digest"] = np.frombuffer(digests, np.uint8).reshape(count, DIGEST_BYTES)
        batch["parent"] = np.frombuffer(parents, np.uint8).reshape(count, DIGEST_BYTES)
        batch["entry_checksum"] = _entry_checksums(batch, at)
        self._next += count
        batch["state"] = 0
        self._entries[at] = batch
        self._entries["state"][at] = IN_USE

    def recover(self, first: int = 0, last: int | None = None) -> Recovered:
        """All valid entries of rows [first, last), or of all; the others, and the older of a page that is there twice,
        are cleared and counted.

        Every checksum is looked at here, so that nobody can use an entry that was not checked. It takes some 1.4 us of
        processor time an entry, the checksum 0.4 of them.
        """
        used = first + np.flatnonzero(self._entries["state"][first:last]).astype(np.int64)
        found = self._entries[used]  # a copy: what is checked is what is used
        good = (found["state"] == IN_USE) & (found["generation"] < self._next)
        for start in range(0, len(used), _CHUNK):
            part = slice(start, start + _CHUNK)
            good[part] &= _entry_checksums(found[part], used[part]) == found["entry_checksum"][part]
        older = _older_duplicates(found, good)
        counts = {DropReason.BAD_ENTRY: int(np.count_nonzero(~good)), DropReason.DUPLICATE: len(older)}
        good[older] = False
        self.clear(used[~good])
        kept = found[good]
        return Recovered(
            rows=used[good],
            namespace_ids=kept["namespace_id"].copy(),  # copies: a field's view would keep all of `kept`
            digests=kept["digest"].copy(),
            parents=kept["parent"].copy(),
            generations=kept["generation"].astype(np.uint64),
            checksums=kept["checksum"].astype(np.uint64),
            flags=kept["flags"].astype(np.uint32),
            report=RecoveryReport(len(kept), {reason: count for reason, count in counts.items() if count}),
        )

    def named(self, namespace_id: bytes, first: int) -> NDArray[np.int64]:
        """Rows from `first` on whose entries, which nobody has checked, are of the namespace; b"": of any."""
        entries = self._entries[first:]
        ours = entries["state"] != 0
        if namespace_id:
            ours &= (entries["namespace_id"] == np.frombuffer(namespace_id, np.uint8)).all(axis=1)
        return first + np.flatnonzero(ours).astype(np.int64)

    def unused(self, first: int, last: int) -> list[tuple[int, int]]:
        """Rows [first, last) without an entry: the first row of each run, and that behind its last."""
        unused = np.concatenate(([False], self._entries["state"][first:last] == 0, [False]))
        ends = first + np.flatnonzero(unused[1:] != unused[:-1])
        return [(int(start), int(end)) for start, end in ends.reshape(-1, 2)]

    def close(self) -> None:
        """Lets go of the entries' memory; from then on there are no rows. Idempotent."""
        self._entries = np.zeros(0, ENTRY)

    def _reserve(self, count: int) -> None:
        header = dataclasses.replace(self._header, generations=self._next + count + _GENERATIONS)
        self._store(header)
        self._header = header


def as_rows(rows: Rows, pages: int) -> NDArray[np.int64]:
    """The rows as an array, (n,). ValueError for a row outside [0, pages)."""
    at = np.asarray(rows, np.int64)
    if at.ndim != 1:
        raise ValueError(f"rows has {at.ndim} dimensions; it must have 1")
    outside = at[(at < 0) | (at >= pages)]
    if len(outside):
        raise ValueError(f"row {outside[0]} is not there; rows are 0 to {pages - 1}")
    return at


def layout_fingerprint(geometry: KVGeometry, shards: int = 1) -> bytes:
    """SHA-256 over every field that pages must have equal, with its name and length, 32 bytes: rows are interchangeable
    only where it is equal.

    shards: head ranges of which a row is made, one behind the other."""
    sha = hashlib.sha256(b"kvferry-host-layout-1")
    for field in (each for each in dataclasses.fields(geometry) if each.compare):
        value = getattr(geometry, field.name)
        if value == ():  # of one cache: as files of before there were others
            continue
        value = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        data = str(value.name if isinstance(value, enum.Enum) else value).encode()
        sha.update(f"\n{field.name}:{len(data)}:".encode() + data)
    if shards > 1:  # else as files of before there were any
        sha.update(f"\nshards:{shards}".encode())
    return sha.digest()


def _entry_checksums(entries: NDArray[np.void], rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """(n,): what the entries' checksums should be."""
    data = entries.tobytes()
    covered = ENTRY_BYTES - 8
    xxh3 = xxhash.xxh3_64_intdigest
    starts = range(0, len(data), ENTRY_BYTES)
    found = [xxh3(data[start : start + covered], row) for start, row in zip(starts, rows.tolist(), strict=True)]
    return np.array(found, np.uint64)


def _older_duplicates(entries: NDArray[np.void], good: NDArray[np.bool_]) -> list[int]:
    """Indices of the good entries whose page another good entry of a higher generation has."""
    # Sorting eight bytes of the digests leaves few candidates to be looked at one by one.
    keys = np.ascontiguousarray(entries["digest"][:, :8]).view(np.uint64)[:, 0]
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    candidates = np.flatnonzero(good & (counts[inverse] > 1))
    youngest: dict[bytes, int] = {}
    older: list[int] = []
    for index in candidates[np.argsort(entries["generation"][candidates], kind="stable")].tolist():
        page = entries["namespace_id"][index].tobytes() + entries["digest"][index].tobytes()
        before = youngest.get(page)
        if before is not None:
            older.append(before)
        youngest[page] = index
    return older
