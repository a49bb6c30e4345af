"""Models of latent attention (DeepSeek V3's shape), one with an indexer's keys beside its latents (V3.2's), between
sides of unlike numbers of ranks: every token equals plain transformers', also of pages that were spilled, restored and
asked for again, and all ranks of a side hold the same bytes of a prompt."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName
from kvferry.daemon.cli.stack import Stack
from kvferry.proto import common_pb2
from kvferry.radix.digests import prompt_digests
from kvferry.workers.models.transformer import kv_shape
from tests.support import tiny_models
from tests.support.engines import Engines, describe, settled
from tests.system.serving.test_greedy import (
    NEW_TOKENS,
    PAGE,
    SMALL,
    Family,
    aligned,
    check_that_all_was_kept,
    compare,
    converse,
    serve,
)

LATENT, INDEX = 3 * 16 * 4, 3 * 8 * 4  # bytes of a token, float32
ROWS = "kvferry-host-decode.rows"
CASES = [
    pytest.param("deepseek_v3", (1, 2), LATENT, marks=pytest.mark.nightly),
    pytest.param("deepseek_v3", (2, 4), LATENT, marks=pytest.mark.nightly),
    pytest.param("deepseek_v32", (1, 2), LATENT + INDEX, marks=pytest.mark.nightly),
    pytest.param("deepseek_v32", (2, 1), LATENT + INDEX, marks=pytest.mark.nightly),
    pytest.param("deepseek_v32", (2, 4), LATENT + INDEX, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("source", "ranks", "token_bytes"), CASES)
def test_latents_between_unlike_ranks(
    stack: Stack, tmp_path: Path, source: str, ranks: tuple[int, int], token_bytes: int
) -> None:
    folder, rows = tmp_path / "model", tmp_path / "rows"
    rows.mkdir()
    model = tiny_models.random_model(source)
    model.save_pretrained(folder)
    assert kv_shape(model).token_bytes == token_bytes
    threads = torch.get_num_threads()
    own = ["--host-dir", str(rows)]
    family = serve(stack, folder, None, pool_pages=14, host_pages=300, ranks=ranks, decode_flags=own)
    scripts = family.scripts(range(3), 3, SMALL)
    with Engines(family.prefill, family.decode) as engines:
        talks = converse(engines, scripts, NEW_TOKENS, at_a_time=1)
        decode, prefill = settled(family.decode), settled(family.prefill)
        check_that_all_was_kept(talks)
        asyncio.run(_check_ranks(family, talks[-1].prompts[-1], ranks))
        _break_rows(rows / ROWS, PAGE * token_bytes)
        again = [[engines.turn(prompt, NEW_TOKENS, deadline_s=120.0) for prompt in talk.prompts] for talk in talks]
    compare(family.model, talks)
    assert [turn.details for turns in again for turn in turns if turn.error] == []
    assert [[turn.output for turn in turns] for turns in again] == [[turn.output for turn in t.turns] for t in talks]
    for side, count in ((prefill, ranks[0]), (decode, ranks[1])):
        assert side.host.page_bytes == PAGE * token_bytes, "once, whatever the ranks"
        assert side.pool.page_bytes == count * PAGE * token_bytes
        assert side.tiers.restored_pages > 0
        assert side.tiers.dropped_pages == side.tiers.mismatched_pages == 0
    moved = sum(turn.delta_pages for talk in talks for turn in talk.turns)
    wire = decode.transfers
    assert wire.wire_bytes - 64 * wire.parts == moved * ranks[1] * PAGE * token_bytes
    print(f"{source}, {ranks}: {token_bytes} bytes a token in the host tier and to each rank")
    broken = settled(family.decode)
    assert broken.tiers.mismatched_pages > 0 and broken.transfers.asked_again > 0
    asyncio.run(_check_ranks(family, talks[-1].prompts[-1], ranks))
    torch.set_num_threads(threads)


def _break_rows(path: Path, row_bytes: int) -> None:
    """Every row's last byte, which is of its last cache."""
    data = bytearray(path.read_bytes())
    for end in range(row_bytes, len(data) + 1, row_bytes):
        data[end - 1] ^= 0xFF
    with path.open("r+b") as rows:
        rows.write(data)


async def _check_ranks(family: Family, prompt: list[int], ranks: tuple[int, int]) -> None:
    """Asserts that all ranks of a side have the same bytes of the prompt's full pages: a model reads the first's. The
    daemons tell which pages those are, to workers of this test's own."""
    sides = ((family.prefill, common_pb2.ROLE_PREFILL), (family.decode, common_pb2.ROLE_DECODE))
    prefill, decode = [
        await DaemonClient.connect(side.socket, role, describe(side).facts, "test") for side, role in sides
    ]
    name, told = RequestName(os.urandom(16), 1), prompt_digests(prompt, page_size=PAGE)
    asked: dict[str, Any] = {"digests": told.digests, "tokens": told.tokens, "tail_digest": told.tail, "deadline_s": 30}
    try:
        prefill.begin(name, **asked)
        admitted = await decode.admit(name, **asked, prefill=family.prefill.name, max_new_tokens=1)
        begun = await prefill.begun(name)
        assert admitted.matched_tokens == begun.matched_tokens == aligned(len(prompt)) and admitted.host_tokens == 0
        for client, pages, count in ((prefill, begun.pages, ranks[0]), (decode, admitted.pages, ranks[1])):
            assert len(client.pools.memories) == count
            for page in pages[: len(prompt) // PAGE]:
                for cache in range(len(client.geometry.caches)):
                    first, *others = (client.pools.read(rank, page, cache) for rank in range(count))
                    assert first.any(), "nothing was ever written there"
                    assert all(np.array_equal(first, other) for other in others), f"cache {cache} of page {page}"
    finally:
        await prefill.close()
        await decode.close()
