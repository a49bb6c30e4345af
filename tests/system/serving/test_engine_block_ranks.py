"""Engines of several ranks with blocks of their own, between daemons: heads go to the ranks that have them, and come
back from the host tier."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.client.requests import DaemonGone, RequestFailed
from kvferry.daemon.cli.stack import Process, Stack
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from tests.support.block_engine import PAGE, Prompt, Share, new_name
from tests.support.engines import side_stats
from tests.support.rank_clients import RankClients
from tests.system.serving.block_pairs import Pair

NHD = KVGeometry(2, 4, 4, "float32", PAGE, Layout.ENGINE)
HND = replace(NHD, head_runs=1)
GROUPED = replace(HND, kv_heads=2)

Case = tuple[KVGeometry, int, int]  # ranks of prefill, of decode
CASES: dict[str, Case] = {
    "2 to 4": (HND, 2, 4),
    "grouped queries, 4 to 1": (GROUPED, 4, 1),
}
NIGHTLY: dict[str, Case] = {
    "whole pages, 2 to 2": (NHD, 2, 2),
    "1 to 2": (HND, 1, 2),
    "2 to 1": (HND, 2, 1),
    "4 to 2": (HND, 4, 2),
    "8 to 2": (HND, 8, 2),
    "2 to 2, K and V apart": (replace(HND, head_runs=2), 2, 2),
    "grouped queries, 2 to 4": (GROUPED, 2, 4),
    "whole pages of grouped queries, 2 to 4": (replace(NHD, kv_heads=2), 2, 4),
}


def shares(case: Case) -> tuple[Share, Share]:
    geometry, prefill, decode = case
    return Share(geometry, prefill), Share(geometry, decode)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name) for name, case in CASES.items()]
    + [pytest.param(case, id=name, marks=pytest.mark.nightly) for name, case in NIGHTLY.items()],
)
def test_heads_go_between_blocks_of_ranks_and_to_the_host_tier(stack: Stack, case: Case) -> None:
    async def run() -> None:
        async with Pair(stack, "--checksums", "on", shares=shares(case)) as pair:
            for tokens, start, chunk in ((1, 0, 16), (61, 0, 16), (64, 20, 32), (75, 36, 16)):
                blocks, _ = await pair.hand_over(Prompt(tokens, tokens * 100 + start), start, chunk)
                if behind := tokens % pair.decode.block_tokens:
                    for rank in range(case[2]):
                        rest = pair.decode.held(rank)[:, blocks[-1], behind:]
                        assert (rest == 0).all(), "what prefill's engine had there has been sent"
                pair.decode.give_back(blocks)
            prompt = Prompt(70, 5)
            blocks, _ = await pair.hand_over(prompt)
            await pair.decode.store(prompt, blocks)
            pair.decode.give_back(blocks)
            blocks, held = await pair.hand_over(prompt, 20)
            assert held == 64
            pair.decode.give_back(blocks)
            side = side_stats(pair.decode.socket)
            assert side.host.page_bytes == case[0].page_bytes and side.host.cached == 4
            assert side.tiers.restored_pages == 3 and side.tiers.mismatched_pages == 0
            assert side.transfers.failed == side.transfers.mismatched_parts == 0

    asyncio.run(run())


APART: dict[str, tuple[Share, Share]] = {
    "1 to 2": (Share(HND), Share(HND, 2, apart=True)),
    "2 to 1": (Share(HND, 2, apart=True), Share(HND)),
    "whole pages, 2 to 2": (Share(NHD, 2, apart=True), Share(NHD, 2, apart=True)),
}


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param(shares, id=name, marks=[] if name == "2 to 1" else pytest.mark.nightly)
        for name, shares in APART.items()
    ],
)
def test_ranks_with_sessions_of_their_own_are_one_engine(stack: Stack, shares: tuple[Share, Share]) -> None:
    async def run() -> None:
        async with Pair(stack, "--checksums", "on", shares=shares) as pair:
            for tokens, start, chunk in ((1, 0, 16), (75, 36, 16)):
                blocks, _ = await pair.hand_over(Prompt(tokens, tokens), start, chunk)
                pair.decode.give_back(blocks)
            prompt = Prompt(70, 5)
            blocks, _ = await pair.hand_over(prompt)
            await pair.decode.store(prompt, blocks)
            pair.decode.give_back(blocks)
            blocks, held = await pair.hand_over(prompt, 20)
            assert held == 64 and pair.decode.wrong(prompt, blocks, 20, 70) == []
            pair.decode.give_back(blocks)
            for engine in (pair.prefill, pair.decode):
                side = side_stats(engine.socket)
                assert side.requests.running == side.pool.locks == 0
                assert side.workers == 1

    asyncio.run(run())


def test_a_rank_that_breaks_off_takes_its_engine_with_it_and_the_next_one_is_taken_in(stack: Stack) -> None:
    async def run() -> None:
        pair = Pair(stack, shares=(Share(HND), Share(HND, 2, apart=True)))
        await pair.prefill.connect()
        await pair.decode.connect()
        name, prompt = new_name(), Prompt(40, 1)
        blocks = pair.decode.take(40)
        waiting = asyncio.create_task(pair.decode.fetch(prompt, name, blocks, 0, "p"))  # nobody computes it
        await asyncio.sleep(0.3)
        assert isinstance(pair.decode.client, RankClients)
        first, second = pair.decode.client.clients
        second._stream.frames.abort()
        gone = await asyncio.wait_for(first.gone, 10)
        assert isinstance(gone, DaemonGone)
        with pytest.raises((DaemonGone, RequestFailed)):
            await waiting
        await pair.decode.client.close()
        pair.decode = await replace(pair.decode).connect()
        await pair.hand_over(Prompt(40, 2))
        await pair.decode.client.close()
        await pair.prefill.client.close()

    asyncio.run(run())


def test_engines_of_unlike_ranks_are_told_what_to_set(stack: Stack) -> None:
    async def run() -> None:
        async with Pair(stack, shares=shares((NHD, 4, 2))) as pair:
            prompt = Prompt(40, 1)
            blocks = pair.decode.take(40)
            said = r"ranks is 4 of prefill and 2 of decode, and geometry\.head_runs is 0: .*VLLM_KV_CACHE_LAYOUT=HND"
            with pytest.raises(RequestFailed, match=said):
                await pair.decode.fetch(prompt, new_name(), blocks, 0, "p")
            assert not pair.decode.touched()

    asyncio.run(run())


def test_an_engine_that_comes_again_says_anew_how_its_pages_are_cut(stack: Stack) -> None:
    """As one does whose connector was upgraded: its pages are the same, and go to unlike ranks from then on."""

    async def run() -> None:
        pair = Pair(stack, shares=(Share(NHD, 1), Share(HND, 2)))
        await pair.prefill.connect()
        await pair.decode.connect()
        blocks = pair.decode.take(40)
        with pytest.raises(RequestFailed, match=r"geometry\.head_runs is 0"):
            await pair.decode.fetch(Prompt(40, 1), new_name(), blocks, 0, "p")
        pair.decode.give_back(blocks)
        await pair.prefill.client.close()
        pair.prefill = await replace(pair.prefill, share=Share(HND, 1)).connect()
        await pair.hand_over(Prompt(40, 2))
        await pair.decode.client.close()
        await pair.prefill.client.close()

    asyncio.run(run())


async def found_again(daemon: Process) -> None:
    """The file is read while the daemon serves already."""
    for _ in range(200):
        if "entries found again" in daemon.tail():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(daemon.tail())


@pytest.mark.nightly
def test_the_file_of_ranks_is_found_again(stack: Stack, tmp_path: Path) -> None:
    """By a daemon whose engine has as many shares of the heads."""

    async def run() -> None:
        pair = Pair(stack, host=("--host-bytes", "1MiB", "--host-dir", str(tmp_path)), shares=shares((GROUPED, 1, 4)))
        await pair.prefill.connect()
        await pair.decode.connect()
        prompt = Prompt(64, 5)
        blocks, _ = await pair.hand_over(prompt)
        await pair.decode.store(prompt, blocks)
        await pair.decode.client.close()
        assert stack.stop(pair.decode_daemon) == 0
        for ranks, found in ((4, 64), (2, 64), (1, 0)):
            decode = replace(pair.decode, share=Share(GROUPED, ranks))
            daemon = stack.start("decode", [*pair.words["decode"][:-1], str(ranks)])
            stack.ready(daemon)
            await decode.connect()
            await found_again(daemon)
            blocks = decode.take(64)
            if not found:
                assert side_stats(decode.socket).host.cached == 0
            else:
                admitted = await decode.fetch(Prompt(65, 5), new_name(), blocks, 0, "")
                assert admitted.local_tokens == found and decode.wrong(prompt, blocks, 0, 64) == []
            await decode.client.close()
            assert stack.stop(daemon) == 0
        await pair.prefill.client.close()

    asyncio.run(run())
