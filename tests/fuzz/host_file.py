"""The host tier's files, of any content and size: opened, recovered into a tree, and read as a restore reads them.

Frames: of tag 0 the index's bytes, of tag 1 the rows', of tag 2 what both are cut or grown to (two sizes), of tag 3 an
entry by its fields, and of tag 4 a header, whose checksums are right: hostile ones must not get by on a wrong checksum
alone. The tier has 16 rows.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from random import Random

import numpy as np

from kvferry.daemon.core.cache import MAX_NAMESPACES, Cache
from kvferry.radix.pool import PageState
from kvferry.transfer.host_tier.index import _MAX_GENERATION as MAX_GENERATION
from kvferry.transfer.host_tier.index import (
    ENTRY,
    ENTRY_BYTES,
    HEADER_BYTES,
    IN_USE,
    Header,
    _entry_checksums,
    layout_fingerprint,
)
from kvferry.transfer.host_tier.rows import FileRows, checksum_rows, verify_rows
from tests.fuzz.frames import Frame, bytes_changed, change, join, split
from tests.fuzz.stage import FACTS, FOLDER, PROMPTS, Finding
from tests.simulation.prompts import GEOMETRY

INDEX, ROWS, SIZES, ENTRY_OF, HEADER_OF = range(5)
PAGES, PAGE_BYTES = 16, 64
LAYOUT = layout_fingerprint(GEOMETRY)
MAX_SIZE = 32 << 20  # of a file in this test: sparse, and still read
_SIZES = struct.Struct("<QQ")
_ENTRY = struct.Struct("<HIIQQBBB")  # row, state, flags, generation, checksum of the row; namespace, prompt, page
_HEADER = struct.Struct("<QQQ32s")  # page bytes, pages, generations, layout
_PATHS = tuple(os.path.join(FOLDER, f"kvferry-host-fuzz.{end}") for end in ("index", "rows"))


def one_input(data: bytes) -> None:
    files, sizes = [bytearray(), bytearray()], (None, None)
    for frame in split(data):
        tag = frame.tag % 5
        if tag in (INDEX, ROWS):
            files[tag] = bytearray(frame.body)
        elif tag == SIZES and len(frame.body) >= _SIZES.size:
            sizes = _SIZES.unpack_from(frame.body)  # type: ignore[assignment]
        elif tag == ENTRY_OF and len(frame.body) >= _ENTRY.size:
            _put(files[INDEX], *_entry(*_ENTRY.unpack_from(frame.body)))
        elif tag == HEADER_OF and len(frame.body) >= _HEADER.size:
            page_bytes, pages, generations, layout = _HEADER.unpack_from(frame.body)
            try:
                _put(files[INDEX], 0, Header(page_bytes, pages, layout, generations).encode())
            except ValueError:
                continue
    for path, content, size in zip(_PATHS, files, sizes, strict=True):
        with open(path, "wb") as file:
            file.write(content)
            if size is not None:
                file.truncate(size % MAX_SIZE)
    _look()


def _put(content: bytearray, at: int, data: bytes) -> None:
    if len(content) < at + len(data):
        content.extend(bytes(at + len(data) - len(content)))
    content[at : at + len(data)] = data


def _entry(
    row: int, state: int, flags: int, generation: int, checksum: int, space: int, prompt: int, page: int
) -> tuple[int, bytes]:
    row %= 64
    entry = np.zeros(1, ENTRY)
    digests = PROMPTS[prompt % len(PROMPTS)].digests
    at = page % (len(digests) // 32) * 32
    entry["state"], entry["flags"], entry["generation"], entry["checksum"] = state, flags, generation, checksum
    entry["namespace_id"] = np.frombuffer(FACTS.id if space < 200 else bytes([space]) * 32, np.uint8)
    entry["digest"] = np.frombuffer(digests[at : at + 32], np.uint8)
    entry["parent"] = np.frombuffer(digests[at - 32 : at] if at else bytes(32), np.uint8)
    entry["entry_checksum"] = _entry_checksums(entry, np.array([row]))
    return HEADER_BYTES + row * ENTRY_BYTES, entry.tobytes()


def _look() -> None:
    """As a daemon does at its start, and twice: what the first one leaves is valid for the second one."""
    kept: Sequence[int] | None = None
    with open(_PATHS[0], "rb") as index:
        header = Header.decode(index.read(HEADER_BYTES))
    # Behind so high a number there is room for one process only, and the next one begins anew.
    times = 1 if header is not None and header.generations > MAX_GENERATION - (1 << 40) else 2
    for _ in range(times):
        rows = FileRows.open(FOLDER, pages=PAGES, page_bytes=PAGE_BYTES, layout=LAYOUT, role="fuzz")
        try:
            found = rows.recover()
            if kept is not None and (found.rows.tolist() != kept or found.report.dropped):
                raise Finding(f"found again: {found.rows.tolist()} of {kept}, {found.report}")
            kept = found.rows.tolist()
            cache = Cache(8, GEOMETRY.page_size, host_pages=PAGES)
            assert cache.host is not None
            cache.host.log_frees = True
            cache.host.claim(found.rows.tolist(), PageState.LEASED)
            for space in {one.tobytes() for one in found.namespace_ids}:
                if len(cache.namespaces) >= MAX_NAMESPACES - 1:
                    break
                mine = [index for index, one in enumerate(found.namespace_ids) if one.tobytes() == space]
                outputs = (found.flags[mine] & 1).astype(np.uint8).tobytes()
                digests, parents = found.digests[mine].tobytes(), found.parents[mine].tobytes()
                namespace = cache.namespace(space)
                cache.recover(namespace, digests, parents, found.rows[mine].tolist(), outputs)
                namespace.tree.check()
            cache.host.check()
            wrong = verify_rows(rows.buffer, found.rows.tolist(), PAGE_BYTES, found.checksums)
            real = checksum_rows(rows.buffer, found.rows.tolist(), PAGE_BYTES)
            if wrong != [row for row, one, other in zip(kept, real, found.checksums, strict=True) if one != other]:
                raise Finding(f"rows {wrong} are said to be wrong")
            del found
        finally:
            rows.close()


def _change_body(frame: Frame, chance: Random) -> Frame:
    if chance.random() < 0.4 or frame.tag in (INDEX, ROWS):
        return Frame(frame.tag, bytes_changed(frame.body, chance, 1 << 13))
    if frame.tag == SIZES:
        sizes = [
            chance.choice((0, 1, 4095, 4096, 4096 + 136, 1 << 14, 1 << 20, chance.randrange(1 << 25))) for _ in "ab"
        ]
        return Frame(SIZES, _SIZES.pack(*sizes))
    if frame.tag == HEADER_OF:
        numbers = [
            chance.choice((1, 16, 17, 64, 1 << 20, 1 << 28, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)) for _ in "abc"
        ]
        for at, usual in enumerate((PAGE_BYTES, PAGES, 2)):
            if chance.random() < 0.6:
                numbers[at] = usual
        return Frame(HEADER_OF, _HEADER.pack(*numbers, LAYOUT if chance.random() < 0.9 else bytes(32)))
    entry = [chance.randrange(20), IN_USE, chance.choice((0, 1, 7)), chance.choice((0, 1, 2, 3, (1 << 64) - 1)), 0]
    entry[1] = chance.choice((IN_USE, IN_USE, IN_USE, 0, 1, (1 << 32) - 1))
    return Frame(ENTRY_OF, _ENTRY.pack(*entry, chance.randrange(256), chance.randrange(4), chance.randrange(6)))


def mutate(data: bytes, most: int, seed: int) -> bytes:
    return change(data, most, Random(seed), SEEDS, _change_body)


def _seeds() -> list[bytes]:
    header = Frame(HEADER_OF, _HEADER.pack(PAGE_BYTES, PAGES, 100, LAYOUT))
    rows = Frame(ROWS, bytes(range(PAGE_BYTES)) * PAGES)
    index = Frame(INDEX, bytes(HEADER_BYTES + PAGES * ENTRY_BYTES))
    sizes = Frame(SIZES, _SIZES.pack(HEADER_BYTES + PAGES * ENTRY_BYTES, PAGES * PAGE_BYTES))

    def entry(row: int, prompt: int, page: int, generation: int, space: int = 0) -> Frame:
        return Frame(ENTRY_OF, _ENTRY.pack(row, IN_USE, row % 2, generation, row, space, prompt, page))

    chain = [entry(row, 1, row, row + 1) for row in range(3)]
    return [
        join([index, header, rows, *chain]),
        join([index, header, rows, *chain, entry(5, 1, 0, 9), entry(6, 3, 2, 4), entry(7, 3, 3, 5, 201), sizes]),
        join([header, *chain, entry(15, 3, 4, 99), sizes, rows]),
    ]


SEEDS = _seeds()
