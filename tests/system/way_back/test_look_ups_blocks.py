"""Conversations that move from one decode server to another, below engines with blocks of their own: what the first one
has in its host tier comes into the prefill engine's blocks, byte for byte."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from tests.support.block_engine import PAGE, BlockEngine, Prompt, Share, new_name
from tests.support.engines import side_stats
from tests.system.serving.block_pairs import Pair, need, session_up
from tests.system.way_back.conversations import ALWAYS
from tests.system.way_back.test_way_back_blocks import DEVICES, TOKENS, fetch_and_compute

HND = KVGeometry(2, 4, 4, "float32", PAGE, Layout.ENGINE, head_runs=1)
HELD = TOKENS // PAGE * PAGE
RANKS = {
    "2 to 1": (Share(HND, 2, apart=True), Share(HND)),
    "1 to 2": (Share(HND), Share(HND, 2, apart=True)),
}


async def another_decode(stack: Stack, pair: Pair) -> BlockEngine:
    """A second decode engine, with a daemon of its own."""
    words = list(pair.words["decode"])
    socket = os.path.join(stack.folder, "other.sock")
    words[words.index("--name") + 1], words[words.index("--socket") + 1] = "other", socket
    if "--host-dir" in words:
        at = words.index("--host-dir")
        words[at : at + 2] = []
    stack.ready(stack.start("other", words))
    return await replace(pair.decode, socket=socket).connect()


async def move(stack: Stack, pair: Pair, prompt: Prompt, before: Callable[[], None] | None = None) -> int:
    """Has the prompt computed for one decode engine, which stores it, and then for another, which has never seen it.
    The tokens that came back to prefill's engine."""
    blocks, _ = await pair.hand_over(prompt)
    await pair.decode.store(prompt, blocks)
    pair.decode.give_back(blocks)
    other = await another_decode(stack, pair)
    await session_up(other, pair.prefill)
    if before is not None:
        before()
    name, blocks = new_name(), other.take(TOKENS)
    matched, admitted = await asyncio.gather(
        fetch_and_compute(pair, prompt, name), other.fetch(prompt, name, blocks, 0, "p")
    )
    assert admitted.matched_tokens == 0 and other.wrong(prompt, blocks, 0, TOKENS) == []
    assert not other.touched() and not pair.prefill.touched()
    await other.client.close()
    return matched


async def moved(stack: Stack, pair: Pair) -> None:
    async with pair:
        await session_up(pair.decode, pair.prefill)
        assert await move(stack, pair, Prompt(TOKENS, 1)) == HELD
        asked, holder = (side_stats(engine.socket) for engine in (pair.prefill, pair.decode))
        assert asked.way_back.elsewhere_tokens == asked.way_back.fetched_tokens == HELD
        assert (holder.way_back.look_ups.found, holder.way_back.transfers.completed) == (1, 1)
        assert holder.way_back.transfers.delta_pages == HELD // PAGE
        assert asked.way_back.transfers.mismatched_parts == holder.pool.locks == holder.host.locks == 0


@pytest.mark.parametrize("devices", DEVICES)
def test_what_the_first_one_has_in_its_host_tier_is_fetched(stack: Stack, devices: tuple[str, str]) -> None:
    need(*devices)
    asyncio.run(moved(stack, Pair(stack, *ALWAYS, "--checksums", "on", devices=devices)))


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param(shares, id=name, marks=[] if name == "2 to 1" else pytest.mark.nightly)
        for name, shares in RANKS.items()
    ],
)
def test_each_rank_has_its_heads_from_there(stack: Stack, shares: tuple[Share, Share]) -> None:
    asyncio.run(moved(stack, Pair(stack, *ALWAYS, "--checksums", "on", shares=shares)))


@pytest.mark.nightly
def test_what_was_damaged_there_is_computed(stack: Stack, tmp_path: Path) -> None:
    """The file of the tier is wrong in its fourth page."""

    def damage() -> None:
        (file,) = tmp_path.glob("*.rows")
        page = bytes(token for index in range(3 * PAGE, 4 * PAGE) for token in prompt.token(index, Share().geometry))
        content = file.read_bytes()
        place = content.index(page[: Share().token_bytes])  # what the first place has of the page's first token
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(bytes([content[place] ^ 1]))

    prompt = Prompt(TOKENS, 1)

    async def run() -> None:
        host = ("--host-bytes", "1MiB", "--host-dir", str(tmp_path))
        async with Pair(stack, *ALWAYS, "--checksums", "on", host=host) as pair:
            await session_up(pair.decode, pair.prefill)
            assert await move(stack, pair, prompt, damage) == 0
            holder = side_stats(pair.decode.socket)
            assert holder.tiers.mismatched_pages == 1 and holder.host.cached == 3
            assert side_stats(pair.prefill.socket).way_back.transfers.mismatched_parts == 0

    asyncio.run(run())
