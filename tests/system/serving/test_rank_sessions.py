"""The sessions of an engine's ranks, where one of them ends or refuses before the others know."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.one_rank import OneRank
from kvferry.client.requests import DaemonGone, RequestFailed
from kvferry.client.stream import Stream, new_hello, open_stream
from kvferry.daemon.cli.stack import Process, Stack
from kvferry.proto import common_pb2, worker_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from tests.support.block_engine import PAGE, Prompt, Share, new_name
from tests.support.rank_clients import RankClients
from tests.system.serving.block_pairs import Pair

HND = KVGeometry(2, 8, 4, "float32", PAGE, Layout.ENGINE, head_runs=1)
ROLE = common_pb2.ROLE_DECODE
FACTS = Share(HND).facts.to_proto()


def daemon(stack: Stack, ranks: int) -> tuple[Process, str]:
    """A decode daemon and its socket."""
    socket = os.path.join(stack.folder, "d.sock")
    words = ["serve", "--role", "decode", "--name", "d", "--socket", socket, "--listen", "127.0.0.1:0"]
    words += ["--page-size", str(PAGE), "--slot-bytes", "4160", "--pool-bytes", "1MiB", "--max-workers", "1"]
    process = stack.start("d", [*words, "--ranks", str(ranks)])
    stack.ready(process)
    return process, socket


async def hello_of(socket: str, rank: OneRank) -> Stream:
    stream = await open_stream(socket, 5)
    stream.send(worker_pb2.WorkerMessage(hello=new_hello(ROLE, FACTS, f"rank {rank.rank}", 0, None, rank)))
    return stream


async def ranks_of(socket: str, ranks: int, engine: str) -> list[DaemonClient]:
    """The last comes first, and rank 0 a while later."""

    async def come(rank: int) -> DaemonClient:
        await asyncio.sleep(0.3 * (rank == 0))
        own = OneRank(rank, ranks, engine, ROLE)
        return await DaemonClient.connect(socket, ROLE, FACTS, f"{rank}", deadline_s=10, rank=own)

    return list(await asyncio.gather(*map(come, range(ranks))))


async def closed(clients: list[DaemonClient]) -> None:
    await asyncio.gather(*(client.close() for client in clients))


def test_a_rank_that_goes_before_it_has_its_pool_keeps_nobody_waiting(stack: Stack) -> None:
    async def run() -> None:
        _, socket = daemon(stack, 2)
        killed = await hello_of(socket, OneRank(0, 2, "e", ROLE))
        await asyncio.sleep(0.3)
        killed.frames.abort()  # as the kernel does for a killed process
        both = await ranks_of(socket, 2, "e")  # rank 1 is not taken in with the one that was killed
        await asyncio.sleep(0.3)
        assert not any(client.gone.done() for client in both)
        await closed(both)
        unmapped, other = await asyncio.gather(
            hello_of(socket, OneRank(1, 2, "f", ROLE)),
            DaemonClient.connect(socket, ROLE, FACTS, "0", deadline_s=10, rank=OneRank(0, 2, "f", ROLE)),
        )
        await unmapped.welcome(5)
        unmapped.frames.abort()
        began = time.monotonic()
        assert isinstance(await asyncio.wait_for(other.gone, 10), DaemonGone)
        assert time.monotonic() - began < 3, "nobody says that it is quiesced"
        await other.close()

    asyncio.run(run())


def test_an_engine_of_many_ranks_is_one_worker_of_the_bound(stack: Stack) -> None:
    async def run() -> None:
        await closed(await ranks_of(daemon(stack, 8)[1], 8, "e"))

    asyncio.run(run())


@pytest.mark.nightly
def test_a_standstill_of_the_daemon_between_two_ranks_words_fails_nothing(stack: Stack) -> None:
    async def run() -> None:
        process, socket = daemon(stack, 2)
        first, second = await ranks_of(socket, 2, "e")
        name, words = new_name(), {**Prompt(40, 1).words, "prefill": "", "max_new_tokens": 1}
        asking = [asyncio.create_task(first.admit(name, **words, deadline_s=60))]
        await asyncio.sleep(0.3)
        process.popen.send_signal(signal.SIGSTOP)
        asking.append(asyncio.create_task(second.admit(name, **words, deadline_s=60)))
        await asyncio.sleep(11)
        process.popen.send_signal(signal.SIGCONT)
        assert [admitted.matched_tokens for admitted in await asyncio.gather(*asking)] == [0, 0]
        await closed([first, second])

    asyncio.run(run())


def test_decode_hears_at_once_that_a_rank_of_prefill_does_not_begin(stack: Stack) -> None:
    async def run() -> None:
        shares = Share(replace(HND, kv_heads=4), 2, apart=True), Share(replace(HND, kv_heads=4))
        async with Pair(stack, shares=shares) as pair:
            await pair.hand_over(Prompt(40, 9))
            name, prompt = new_name(), Prompt(40, 1)
            blocks = pair.decode.take(40)
            asking = asyncio.create_task(pair.decode.fetch(prompt, name, blocks, 0, "p"))
            await asyncio.sleep(0.5)  # it has been asked for
            assert isinstance(pair.prefill.client, RankClients)
            pair.prefill.client.clients[1].decline(name, "it has no session")
            began = time.monotonic()
            with pytest.raises(RequestFailed, match="rank 1 of the engine has aborted it"):
                await asking
            assert time.monotonic() - began < 5, "decode's own deadline is later"
            pair.decode.give_back(blocks)
            await pair.hand_over(Prompt(40, 2))

    asyncio.run(run())
