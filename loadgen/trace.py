"""Mooncake-format traces: a line a request, {"timestamp": ms, "input_length", "output_length", "hash_ids": []}, an id
for each 512 tokens of its prompt. The same id becomes the same 512 tokens wherever it occurs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from kvferry.loadgen.distributions import Distribution, generator
from kvferry.loadgen.scripts import (
    FIRST_TOKEN,
    TextScript,
    TokenRun,
    TokenScript,
    TokenTurn,
    WorkloadError,
    check_vocabulary,
    token_run,
)

BLOCK_TOKENS = 512
CACHED_BLOCKS = 4096  # as JSON, about 3 KB each
MAX_LINE = 1 << 24  # characters


@dataclass(frozen=True, slots=True)
class TraceRequest:
    seconds: float  # from the trace's start
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests. Raises WorkloadError naming line and field."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = iter(lambda: file.readline(MAX_LINE + 1), "")
            requests = [_request(f"{path}:{i}", line) for i, line in enumerate(islice(lines, limit), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: {error}") from error
    if not requests:
        raise WorkloadError(f"{path}: no requests")
    return requests


def _request(where: str, line: str) -> TraceRequest:
    if len(line) > MAX_LINE:
        raise WorkloadError(f"{where}: has more than {MAX_LINE} characters; a line may have {MAX_LINE}")
    try:
        record = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise WorkloadError(f"{where}: must be an object, got {type(record).__name__}")
    values = []
    for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 0)):
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < 1 << 53:
            raise WorkloadError(f"{where}: {name} must be a number >= {least}, got {value!r:.60}")
        values.append(value)
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 63 for i in ids):
        raise WorkloadError(f"{where}: hash_ids must be a list of whole numbers >= 0, got {ids!r:.60}")
    tokens = int(values[1])
    if not (len(ids) - 1) * BLOCK_TOKENS < tokens <= len(ids) * BLOCK_TOKENS:
        raise WorkloadError(f"{where}: input_length is {tokens}; {len(ids)} hash_ids are as many blocks of 512 tokens")
    return TraceRequest(values[0] / 1000, tokens, int(values[2]), tuple(ids))


class Trace:
    """One conversation a request. `speed` divides the timestamps; None: requests follow each other without them."""

    def __init__(
        self,
        requests: list[TraceRequest],
        *,
        seed: int,
        vocabulary: int,
        speed: float | None,
        output_tokens: Distribution | None = None,
        label: str = "trace",
    ) -> None:
        """`output_tokens`: instead of the trace's own."""
        if speed is not None and not speed > 0:
            raise WorkloadError(f"speed must be > 0, got {speed:g}")
        self._requests = requests
        self._seed = seed
        self._vocabulary = check_vocabulary(vocabulary)
        self._speed = speed
        self._output = output_tokens
        self._label = label
        self._block = lru_cache(maxsize=CACHED_BLOCKS)(self._make_block)

    @property
    def name(self) -> str:
        pace = "as fast as answered" if self._speed is None else f"its times / {self._speed:g}"
        output = "its own" if self._output is None else str(self._output)
        return f"trace {self._label}: {len(self._requests)} requests, {pace}, output {output}"

    @property
    def conversations(self) -> int:
        return len(self._requests)

    def turns(self, conversation: int) -> int:
        return 1

    def start_s(self, conversation: int) -> float | None:
        return None if self._speed is None else self._requests[conversation].seconds / self._speed

    def text(self, conversation: int) -> TextScript:
        raise WorkloadError("a trace has no text: use --api completions-tokens")

    def tokens(self, conversation: int) -> TokenScript:
        request = self._requests[conversation]
        runs = [self._block(block) for block in request.blocks]
        tail = request.input_tokens % BLOCK_TOKENS
        if tail:
            runs[-1] = token_run(self._ids(request.blocks[-1])[:tail].tolist())
        output = request.output_tokens
        if self._output is not None:
            output = self._output.count(generator(self._seed, "output", conversation), 1)
        return TokenScript((TokenTurn(tuple(runs), max(1, output)),))

    def _make_block(self, block: int) -> TokenRun:
        return token_run(self._ids(block).tolist())

    def _ids(self, block: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.random.default_rng((self._seed, block)).integers(FIRST_TOKEN, self._vocabulary, BLOCK_TOKENS)
