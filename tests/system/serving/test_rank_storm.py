"""Engines whose ranks have sessions of their own, under load: ranks that leave a request at any time, and daemons that
are killed, while pages go both ways. No wrong byte, nobody hangs, nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.requests import DaemonGone, NotOpened, RequestFailed, RequestName
from kvferry.daemon.cli.stack import Stack
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from tests.support.block_engine import PAGE, BlockEngine, Prompt, Share, new_name
from tests.support.engines import side_stats
from tests.support.rank_clients import RankClients
from tests.system.serving.block_pairs import Pair, session_up
from tests.system.way_back.conversations import ALWAYS

HND = KVGeometry(2, 4, 4, "float32", PAGE, Layout.ENGINE, head_runs=1)
DEADLINE_S = 2.0
LEAVE_S = 0.06  # within which those that leave do so
AT_ONCE = 4
CASES = {"1 to 2": (1, 2), "2 to 1": (2, 1), "2 to 2": (2, 2), "4 to 2": (4, 2)}
REST_S = 20.0


class Left(Exception):
    """This rank leaves the request."""


def clients_of(engine: BlockEngine) -> Sequence[DaemonClient]:
    return engine.client.clients if isinstance(engine.client, RankClients) else [engine.client]


def leaves(chosen: random.Random, ranks: int) -> list[float]:
    """Seconds behind which each rank leaves; most never do."""
    leaver = chosen.randrange(ranks) if chosen.random() < 0.4 else -1
    return [chosen.uniform(0, LEAVE_S) if rank == leaver else DEADLINE_S * 4 for rank in range(ranks)]


async def unless_it_leaves(work: Awaitable[object], seconds: float, client: DaemonClient, name: RequestName) -> bool:
    """Whether the work came to its end; else the request is over behind this, and touches no block."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise Left
        task.result()
        return True
    except (Left, RequestFailed, NotOpened, DaemonGone) as error:
        if isinstance(error, NotOpened):
            client.decline(name, "not opened")
        await client.release(name, "it left")
        return False


async def fetch(
    client: DaemonClient, prompt: Prompt, name: RequestName, blocks: Sequence[int], held: int, per_block: int
) -> None:
    """The engine holds the first `held` tokens itself."""
    await client.admit(
        name,
        **prompt.words,  # type: ignore[arg-type]
        prefill="p",
        max_new_tokens=1,
        deadline_s=DEADLINE_S,
        held_tokens=held,
        blocks=blocks[held // per_block :],
        blocks_from=held,
        held_blocks=blocks[: held // per_block],
    )
    if held:
        client.progress(name, held)
    await client.ready(name)
    await client.finish(name, tokens=prompt.tokens, digests=b"")


async def push(client: DaemonClient, prompt: Prompt, name: RequestName, blocks: Sequence[int]) -> None:
    client.begin(name, **prompt.words, deadline_s=DEADLINE_S, blocks=blocks)  # type: ignore[arg-type]
    await client.begun(name)
    for done in range(PAGE, prompt.tokens + PAGE, PAGE):
        client.progress(name, min(done, prompt.tokens))
        await asyncio.sleep(0)
    client.aux(name, b"first")
    await client.ended(name, DEADLINE_S * 2)


class Storm:
    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.chosen = random.Random(seed)
        self.served = self.left = self.fetched = 0

    async def one(self, number: int) -> None:
        pair, chosen = self.pair, self.chosen
        prompt, name = Prompt(chosen.randrange(20, 75), number), new_name()
        there, here = pair.prefill, pair.decode
        sources, blocks = there.take(prompt.tokens), here.take(prompt.tokens)
        held = chosen.randint(1, (prompt.tokens - 1) // PAGE) * PAGE if number % 2 else 0
        here.compute(prompt, blocks, 0, held)

        came: list[int] = []

        async def pushes(client: DaemonClient) -> None:
            if held:
                bounds = {"deadline_s": DEADLINE_S, "ended_s": 2 * DEADLINE_S}
                came.append(await there.fetch_and_push(client, prompt, name, sources, **bounds))
            else:
                await push(client, prompt, name, sources)

        if not held:
            there.compute(prompt, sources, 0, prompt.tokens)
        pushed = self.on_ranks(there, pushes, name)
        fetched = self.on_ranks(here, lambda client: fetch(client, prompt, name, blocks, held, here.block_tokens), name)
        _, arrived = await asyncio.gather(pushed, fetched)
        self.fetched += len(came) == len(clients_of(there)) and min(came) > 0
        if arrived:
            self.served += 1
            assert here.wrong(prompt, blocks, 0, prompt.tokens) == []
        else:
            self.left += 1
        there.give_back(sources)
        here.give_back(blocks)

    async def on_ranks(
        self,
        engine: BlockEngine,
        work: Callable[[DaemonClient], Awaitable[None]],
        name: RequestName,
    ) -> bool:
        clients = clients_of(engine)
        seconds = leaves(self.chosen, len(clients))
        each = zip(clients, seconds, strict=True)
        ended = (unless_it_leaves(work(client), after, client, name) for client, after in each)
        return all(await asyncio.gather(*ended))

    async def some(self, numbers: Sequence[int]) -> None:
        waiting = list(numbers)

        async def loop() -> None:
            while waiting:
                await self.one(waiting.pop())

        await asyncio.wait_for(asyncio.gather(*(loop() for _ in range(AT_ONCE))), 30 * DEADLINE_S)


async def at_rest(engine: BlockEngine) -> None:
    for _ in range(int(REST_S / 0.1)):
        side = await asyncio.to_thread(side_stats, engine.socket)
        held = (side.requests.running, side.requests.waiting, side.pool.locks, side.pool.leased, side.transfers.active)
        if not any(held):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{engine.role} holds {side.requests} {side.pool} {side.transfers}")


async def start_again(stack: Stack, pair: Pair, role: str) -> None:
    """Starts a daemon that was killed, and its engine's ranks come to it."""
    engine = pair.decode if role == "decode" else pair.prefill
    await engine.client.close()
    daemon = stack.start(role, pair.words[role])
    await asyncio.to_thread(stack.ready, daemon)
    again = await replace(engine).connect()
    if role == "decode":
        pair.decode_daemon, pair.decode = daemon, again
    else:
        pair.prefill_daemon, pair.prefill = daemon, again


async def storm(stack: Stack, ranks: tuple[int, int], requests: int, kills: int) -> None:
    shares = tuple(Share(HND, each, apart=each > 1) for each in ranks)
    pair = Pair(stack, *ALWAYS, "--checksums", "on", shares=(shares[0], shares[1]))
    await pair.prefill.connect()
    await pair.decode.connect()
    running = Storm(pair, seed=sum(ranks))
    for turn in range(kills + 1):
        if turn % 2 == 0:  # else nothing could be asked back: the daemons' session is still to come
            await asyncio.wait_for(session_up(pair.decode), REST_S)
        some = asyncio.create_task(running.some(range(turn * requests, (turn + 1) * requests)))
        if turn < kills:
            role = ("decode", "prefill")[turn % 2]
            await asyncio.sleep(running.chosen.uniform(0.05, 0.4))
            stack.kill(pair.decode_daemon if role == "decode" else pair.prefill_daemon)
            await some
            await start_again(stack, pair, role)
        await some
    assert running.served > requests // 4 and running.left > requests // 8, (running.served, running.left)
    assert running.fetched > requests // 8, running.fetched
    for engine in (pair.prefill, pair.decode):
        await at_rest(engine)
        assert not engine.touched()
    await pair.hand_over(Prompt(70, -1))
    await pair.decode.client.close()
    await pair.prefill.client.close()


@pytest.mark.nightly
def test_ranks_leave_and_each_daemon_is_killed(stack: Stack) -> None:
    asyncio.run(storm(stack, (2, 2), requests=16, kills=2))


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", CASES.values(), ids=CASES)
def test_many_leave_and_daemons_are_killed(stack: Stack, ranks: tuple[int, int]) -> None:
    asyncio.run(storm(stack, ranks, requests=30, kills=10))
