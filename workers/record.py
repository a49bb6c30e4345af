"""Records of a worker's requests, for a comparison of both sides afterwards: `--record FILE`.

One JSON line a request. Of each page of the prompt a sum over its bytes, taken where the pool is: at a prefill worker
when the last page is computed, at a decode worker at the request's end, of the pages moved to it. A page is moved whole
and unchanged where both sums are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from kvferry.client.requests import RequestName
from kvferry.workers.models.interface import Prompt


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request on one side. A decode worker's request that was retracted has a record for each time it was given
    pages."""

    request: str  # id and attempt
    matched: int  # tokens, by this side's cache
    prompt: list[int]  # token ids; prefill: none, the decode worker has them
    output: list[int]
    chunk_ends: list[int]  # prefill
    first_page: int  # of the prompt, of `sums`
    sums: list[int]  # of 64 bits


class Record(Protocol):
    """The sums of finished requests. Both are called in the compute thread, while the request holds its pages."""

    def prefilled(self, name: RequestName, prompt: Prompt, pages: Sequence[int], matched: int, ends: list[int]) -> None:
        """`ends`: of the computed chunks."""

    def decoded(self, name: RequestName, prompt: Prompt, pages: Sequence[int], matched: int, output: list[int]) -> None:
        """`matched`: tokens whose pages were held already."""


def read_record(path: Path) -> list[Recorded]:
    """OSError, or ValueError for what `FileRecord` did not write."""
    adapter = TypeAdapter(Recorded)
    with path.open() as file:
        return [adapter.validate_json(line) for line in file]
