"""SGLang's metadata rows: what prefill tells decode of a request beside its KV, the first token above all."""

from __future__ import annotations

import ctypes
from typing import Any


class MetadataRows:
    """The rows of an engine's metadata buffers: one in each, in the machine's memory. The last buffer has the room's
    number, by which SGLang knows that a row is there: it is written last."""

    def __init__(self, args: Any) -> None:
        """`args`: SGLang's KVArgs."""
        self._places = list(zip(args.aux_data_ptrs, args.aux_item_lens, strict=True))
        self._rows = min(length // item for length, item in zip(args.aux_data_lens, args.aux_item_lens, strict=True))
        self.nbytes = sum(args.aux_item_lens)

    def read(self, row: int) -> bytes:
        """A copy of a row, all buffers' parts one behind the other."""
        self._check(row)
        return b"".join(ctypes.string_at(base + row * size, size) for base, size in self._places)

    def write(self, row: int, content: bytes) -> None:
        """ValueError where it is none of such a row."""
        self._check(row)
        if len(content) != self.nbytes:
            raise ValueError(
                f"the prefill engine's metadata row has {len(content)} bytes, this engine's {self.nbytes}: run the "
                "same SGLang with the same model on both sides"
            )
        at = 0
        for base, size in self._places:
            ctypes.memmove(base + row * size, content[at : at + size], size)
            at += size

    def _check(self, row: int) -> None:
        if not 0 <= row < self._rows:
            raise ValueError(f"row is {row}; it must be 0 to {self._rows - 1}")
