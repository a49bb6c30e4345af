"""Daemons that copy straight from an engine's blocks and into them: what they write, what they leave alone, and when
the engine has its blocks back."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.engine_pools import PoolSpec, make_files
from kvferry.client.requests import DaemonGone, HandshakeFailed, RequestFailed
from kvferry.daemon.cli.stack import Process, Stack
from kvferry.proto import common_pb2
from kvferry.transfer.geometry.kv_geometry import StorageOrder
from tests.support.block_engine import CANARY, FACTS, GEOMETRY, PAGE, Prompt, new_name
from tests.support.engines import side_stats, wait_until
from tests.system.serving.block_pairs import Pair, need
from tests.system.serving.test_tiers import DAMAGES, damage_files

DEVICES = [
    ("cpu", "cpu"),
    pytest.param(("cuda:0", "cuda:0"), marks=pytest.mark.gpu),
    pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.nightly), ("--checksums", "on")])
def test_prompts_go_from_blocks_to_blocks(stack: Stack, flags: tuple[str, ...], devices: tuple[str, str]) -> None:
    need(*devices)

    async def run() -> None:
        async with Pair(stack, *flags, devices=devices) as pair:
            for tokens, start, chunk in ((1, 0, 16), (16, 0, 16), (61, 0, 16), (64, 20, 32), (75, 36, 16), (75, 72, 8)):
                prompt = Prompt(tokens, tokens * 100 + start)
                blocks, _ = await pair.hand_over(prompt, start, chunk)
                behind = tokens % pair.decode.block_tokens
                if behind:
                    rest = pair.decode.held()[:, blocks[-1], behind:]
                    assert (rest == 0).all(), "what prefill's engine had there has been sent"
                pair.decode.give_back(blocks)
            side = side_stats(pair.decode.socket)
            assert side.pool.block_tokens == 4 and side.pool.leased == side.pool.cached == 0
            assert side.transfers.failed == side.transfers.mismatched_parts == 0
            for each in (side, side_stats(pair.prefill.socket)):
                assert each.transfers.copied_bytes == each.transfers.delta_bytes > 0, "one copy on each side"

    asyncio.run(run())


@pytest.mark.parametrize("devices", DEVICES)
def test_the_host_tier_keeps_what_is_handed_in(stack: Stack, devices: tuple[str, str]) -> None:
    need(*devices)

    async def run() -> None:
        async with Pair(stack, "--checksums", "on", devices=devices) as pair:
            prompt = Prompt(70, 5)
            blocks, held = await pair.hand_over(prompt)
            assert held == 0
            await pair.decode.store(prompt, blocks)
            await pair.decode.store(prompt, blocks)  # it is there
            pair.decode.give_back(blocks)
            side = side_stats(pair.decode.socket)
            assert side.host.cached == 4 and side.tiers.backup_pages == 4 and side.pool.cached == 0
            # The engine holds nothing, then a page and a block of it; the rest of the held ones is loaded.
            for start, more in ((0, 6), (20, 7), (0, 8)):
                longer = Prompt(90, more, shared=0) if more == 8 else Prompt(70, 5)
                blocks, held = await pair.hand_over(longer, start)
                assert held == (0 if more == 8 else 64)
                pair.decode.give_back(blocks)
            # Without a prefill half, as far as the tier goes.
            blocks = pair.decode.take(64 - 20)
            admitted = await pair.decode.fetch(Prompt(65, 5), new_name(), blocks, 20, "")
            assert admitted.local_tokens == 64
            assert pair.decode.wrong(Prompt(64, 5), blocks, 20, 64) == [] and not pair.decode.touched()
            side = side_stats(pair.decode.socket)
            assert side.tiers.restored_pages == 4 + 3 + 3 and side.tiers.restore_failed_pages == 0
            assert side.requests.host_hit_tokens == 64 * 3

    asyncio.run(run())


def test_what_an_engine_may_not_say(stack: Stack) -> None:
    async def run() -> None:
        async with Pair(stack) as pair:
            client, prompt = pair.decode.client, Prompt(40, 1)
            for words, blocks, start, held, extra in (
                ("blocks has 96; the engine has blocks 0 to 95", [0, 96], 32, 32, {}),
                ("blocks has 1 entries twice", [3, 3], 32, 32, {}),
                ("blocks_from is 30; it must be a multiple of 4", [3], 30, 16, {}),
                ("blocks has 3 entries from token 32 on; it must have 1 to 2", [1, 2, 3], 32, 32, {}),
                ("held_tokens is 16; with blocks_from 32 it is 32", [1, 2], 32, 16, {}),
                ("blocks has 1 entries; they must go on to the prompt's end", [1], 32, 32, {}),
                ("blocks has 0 entries", [], 0, 0, {}),
                ("max_new_tokens is 2; with blocks it must be 1", [1, 2], 32, 32, {"max_new_tokens": 2}),
            ):
                wanted = {"max_new_tokens": 1, **extra}
                with pytest.raises(RequestFailed, match=words):
                    await client.admit(
                        name := new_name(),
                        **prompt.words,  # type: ignore[arg-type]
                        prefill="p",
                        deadline_s=5,
                        held_tokens=held,
                        blocks=blocks,
                        blocks_from=start,
                        **wanted,
                    )
                await client.abort(name, "refused")
            # A block of a request that has not ended is nobody else's to be written.
            first = new_name()
            waiting = {**prompt.words, "prefill": "p", "max_new_tokens": 1, "deadline_s": 20}
            await client.admit(first, **waiting, blocks=range(10))  # type: ignore[arg-type]
            with pytest.raises(RequestFailed, match="blocks has 9, which is another request's that has not ended"):
                await client.admit(second := new_name(), **waiting, blocks=range(9, 19))  # type: ignore[arg-type]
            await client.abort(second, "refused")
            await client.abort(first, "left")
            await client.admit(first := new_name(), **waiting, blocks=range(9, 19))  # type: ignore[arg-type]
            await client.abort(first, "left")
            for tokens, more, words in (
                (16, [2, 3, 4, 5, 6], "blocks has 5 entries behind 1; the prompt has 5"),
                (32, [2], "tokens is 32; blocks of 16 are named"),
                (16, [1], "blocks has 1, which was named before"),
            ):
                begun = {**prompt.words, "deadline_s": 5, "blocks": [1]}
                pair.prefill.client.begin(name := new_name(), **begun)  # type: ignore[arg-type]
                await pair.prefill.client.begun(name)
                pair.prefill.client.progress(name, tokens, more)
                with pytest.raises(RequestFailed, match=words):
                    await pair.prefill.client.ended(name, 5)

    asyncio.run(run())


@pytest.mark.parametrize("devices", DEVICES)
def test_blocks_come_back_when_the_last_copy_has_ended(stack: Stack, devices: tuple[str, str]) -> None:
    """Requests are aborted at any time, and their blocks given to others as soon as that is answered: nothing is
    written there that is not theirs."""
    need(*devices)

    async def run() -> None:
        chosen = random.Random(7)
        async with Pair(stack, "--checksums", "on", devices=devices) as pair:
            for number in range(40):
                prompt, name = Prompt(chosen.randint(60, 200), number), new_name()
                blocks = pair.decode.take(prompt.tokens)
                fetching = asyncio.ensure_future(pair.decode.fetch(prompt, name, blocks, 0, "p"))
                pushing = asyncio.ensure_future(pair.prefill.push(prompt, name, end=False))
                await asyncio.sleep(chosen.choice([0.0, 0.001, 0.003, 0.01]))
                fetching.cancel()
                await asyncio.gather(fetching, return_exceptions=True)
                await pair.decode.client.abort(name, "left")
                pair.decode.give_back(blocks)
                await asyncio.gather(pushing, return_exceptions=True)
                await pair.prefill.client.abort(name, "left")
                pair.prefill.give_back([block for block in range(40) if block not in pair.prefill.free])
            await asyncio.sleep(0.1)
            assert not pair.decode.touched() and not pair.prefill.touched()
            blocks, _ = await pair.hand_over(Prompt(70, 1000))
            side = side_stats(pair.decode.socket)
            assert side.pool.leased == 0 and side.pool.orphaned == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    "damage", ["flipped rows", *(pytest.param(each, marks=pytest.mark.nightly) for each in DAMAGES[1:])]
)
@pytest.mark.parametrize("devices", DEVICES)
def test_what_a_damaged_file_held_is_sent_again(
    stack: Stack, tmp_path: Path, devices: tuple[str, str], damage: str
) -> None:
    """No wrong byte comes into a block, and every prompt is whole."""
    need(*devices)

    async def run() -> None:
        host = ("--host-bytes", "1MiB", "--host-dir", str(tmp_path))
        async with Pair(stack, "--checksums", "on", devices=devices, host=host) as pair:
            prompts = [Prompt(70, 100 + number) for number in range(6)]
            for prompt in prompts:
                blocks, _ = await pair.hand_over(prompt)
                await pair.decode.store(prompt, blocks)
                pair.decode.give_back(blocks)
            assert side_stats(pair.decode.socket).host.cached == 4 * len(prompts)
            await pair.decode.client.close()
            assert stack.stop(pair.decode_daemon) == 0
            damage_files(damage, tmp_path, GEOMETRY.page_bytes)
            pair.decode_daemon = stack.start("decode", pair.words["decode"])
            stack.ready(pair.decode_daemon)
            await pair.decode.connect()
            await asyncio.to_thread(wait_until, lambda: not reads(pair), 20, "that the file is read")
            for prompt in prompts:
                blocks, _ = await pair.hand_over(prompt)
                pair.decode.give_back(blocks)
            tiers = side_stats(pair.decode.socket).tiers
            if damage == "flipped rows":
                assert tiers.mismatched_pages == tiers.restore_failed_pages > 0
            else:
                assert tiers.discarded_entries > 0 and tiers.recovered_pages < 4 * len(prompts)

    asyncio.run(run())


def reads(pair: Pair) -> bool:
    """Whether decode's tier still grows."""
    host = side_stats(pair.decode.socket).host
    return host.pages < host.asked_pages or host.leased > 0


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.nightly), "decode"])
def test_a_daemon_that_is_killed_takes_no_block_with_it(stack: Stack, role: str) -> None:
    async def run() -> None:
        pair = Pair(stack)
        await pair.prefill.connect()
        await pair.decode.connect()
        await pair.hand_over(Prompt(70, 1))
        daemon: Process = pair.prefill_daemon if role == "prefill" else pair.decode_daemon
        engine = pair.prefill if role == "prefill" else pair.decode
        other = pair.decode if role == "prefill" else pair.prefill
        daemon.popen.send_signal(signal.SIGKILL)
        await asyncio.wait_for(engine.client.gone, 10)
        assert not pair.decode.touched() and not pair.prefill.touched()
        assert (engine.memory[:, engine.free[0]] == CANARY).all(), "the memory stays the engine's"
        await engine.client.close()
        await other.client.close()

    asyncio.run(run())


def test_a_daemon_of_blocks_takes_no_pages(stack: Stack) -> None:
    async def run() -> None:
        pair = Pair(stack)
        engine = await pair.decode.connect()
        await engine.client.close()
        pages = make_files(PoolSpec(8, PAGE, StorageOrder.PAGE_MAJOR, (), 1, "/dev/shm"), GEOMETRY)
        role = common_pb2.ROLE_DECODE
        with pytest.raises(HandshakeFailed, match=r"pool\.block_tokens is 0; engines have registered blocks before"):
            await DaemonClient.connect(engine.socket, role, FACTS.to_proto(), "pages", own=pages)
        await pair.decode.connect()
        await pair.decode.client.close()

    asyncio.run(run())


def test_a_session_that_breaks_proves_nothing(stack: Stack) -> None:
    """A daemon that is heard no more may copy on: blocks are the engine's again when its process has ended."""

    async def run() -> None:
        pair = Pair(stack)
        await pair.prefill.connect()
        client = (await pair.decode.connect()).client
        words = {**Prompt(40, 1).words, "prefill": "p", "max_new_tokens": 1, "deadline_s": 20}
        await client.admit(name := new_name(), **words, blocks=range(10))  # type: ignore[arg-type]
        pair.decode_daemon.popen.send_signal(signal.SIGSTOP)
        client._stream.frames.abort()
        client._break(DaemonGone("cut"))
        released = asyncio.ensure_future(client.release(name, "left"))
        await asyncio.sleep(1.5)
        assert not released.done() and client.end is not None and not client.end.proven
        pair.decode_daemon.popen.send_signal(signal.SIGKILL)
        await asyncio.wait_for(released, 10)
        assert client.end.proven
        await client.close()
        await pair.prefill.client.close()

    asyncio.run(run())


def test_facts_are_those_of_pages() -> None:
    """An engine's blocks and a daemon's pages are of one namespace: either side may be of either kind."""
    assert FACTS.geometry == GEOMETRY
