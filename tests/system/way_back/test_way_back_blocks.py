"""The way back from an engine's blocks to another engine's, of another size: byte for byte, in host memory and on GPUs,
between equal and unlike numbers of ranks, and no block is touched that nobody has named."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvferry.client.requests import RequestName
from kvferry.daemon.cli.stack import Stack
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from tests.support.block_engine import PAGE, Prompt, Share, new_name
from tests.support.engines import side_stats
from tests.system.serving.block_pairs import Pair, need, session_up
from tests.system.way_back.conversations import ALWAYS

DEVICES = [
    ("cpu", "cpu"),
    pytest.param(("cuda:0", "cuda:0"), marks=pytest.mark.gpu),
    pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu),
]
TOKENS = 9 * PAGE + 5
NHD = KVGeometry(2, 4, 4, "float32", PAGE, Layout.ENGINE)
HND = replace(NHD, head_runs=1)
RANKS = {
    "1 to 2": (Share(HND), Share(HND, 2, apart=True)),
    "2 to 1": (Share(HND, 2, apart=True), Share(HND)),
}
NIGHTLY = {
    "whole pages, 2 to 2": (Share(NHD, 2, apart=True), Share(NHD, 2, apart=True)),
    "4 to 2": (Share(HND, 4, apart=True), Share(HND, 2, apart=True)),
    "2 to 4 in one process": (Share(HND, 2), Share(HND, 4)),
    "grouped queries, 1 to 4": (Share(replace(HND, kv_heads=2)), Share(replace(HND, kv_heads=2), 4, apart=True)),
    "grouped queries, 4 to 2": (Share(replace(HND, kv_heads=2), 4), Share(replace(HND, kv_heads=2), 2, apart=True)),
}


async def ask(pair: Pair, prompt: Prompt, name: RequestName, blocks: list[int], held: int, late: float) -> None:
    """The decode engine holds the first `held` tokens, which a step of `late` seconds computes."""
    decode, per_block = pair.decode, pair.decode.block_tokens
    await decode.client.admit(
        name,
        **prompt.words,  # type: ignore[arg-type]
        prefill="p",
        max_new_tokens=1,
        deadline_s=20,
        held_tokens=held // PAGE * PAGE,
        blocks=blocks[held // per_block :],
        blocks_from=held,
        held_blocks=blocks[: held // PAGE * PAGE // per_block],
    )
    await asyncio.sleep(late)
    decode.compute(prompt, blocks, 0, held)
    decode.client.progress(name, held // PAGE * PAGE)
    await decode.client.ready(name)
    await decode.client.finish(name, tokens=prompt.tokens, digests=b"")


async def fetch_and_compute(pair: Pair, prompt: Prompt, name: RequestName) -> int:
    """The prefill engine has what it can into its blocks, and computes the rest. The tokens that have come."""
    blocks = pair.prefill.take(prompt.tokens)
    matched = await pair.prefill.fetch_and_push(pair.prefill.client, prompt, name, blocks)
    pair.prefill.give_back(blocks)
    return matched


@pytest.mark.parametrize("devices", DEVICES)
def test_what_decodes_engine_holds_comes_into_prefills_blocks(stack: Stack, devices: tuple[str, str]) -> None:
    need(*devices)

    asyncio.run(go_back(Pair(stack, *ALWAYS, "--checksums", "on", devices=devices)))


@pytest.mark.parametrize(
    "shares",
    [pytest.param(shares, id=name) for name, shares in RANKS.items()]
    + [pytest.param(shares, id=name, marks=pytest.mark.nightly) for name, shares in NIGHTLY.items()],
)
def test_each_rank_has_its_heads_back(stack: Stack, shares: tuple[Share, Share]) -> None:
    asyncio.run(go_back(Pair(stack, *ALWAYS, "--checksums", "on", shares=shares)))


async def go_back(new: Pair) -> None:
    async with new as pair:
        assert pair.decode.client.welcome.way_back
        await session_up(pair.decode, pair.prefill)
        fetched = 0
        for number, (held, late) in enumerate([(PAGE, 0.0), (5 * PAGE, 0.05), (5 * PAGE + 4, 0.0), (9 * PAGE, 0.2)]):
            prompt, name = Prompt(TOKENS, number), new_name()
            blocks = pair.decode.take(TOKENS)
            matched, _ = await asyncio.gather(
                fetch_and_compute(pair, prompt, name), ask(pair, prompt, name, blocks, held, late)
            )
            assert matched == held // PAGE * PAGE
            fetched += matched
            assert pair.decode.wrong(prompt, blocks, 0, TOKENS) == []
            assert not pair.decode.touched() and not pair.prefill.touched()
            pair.decode.give_back(blocks)
        sides = [side_stats(engine.socket) for engine in (pair.prefill, pair.decode)]
        assert [side.way_back.transfers.delta_pages for side in sides] == [fetched // PAGE] * 2
        assert [side.way_back.transfers.mismatched_parts for side in sides] == [0, 0]
        assert [side.pool.leased for side in sides] == [0, 0]
