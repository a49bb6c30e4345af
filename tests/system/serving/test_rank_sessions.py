"""The sessions of an engine's ranks, where one of them ends or refuses before the others know."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.one_rank import OneRank
from kvferry.client.requests import DaemonGone, RequestFailed, RequestName
from kvferry.client.stream import Stream, new_hello, open_stream
from kvferry.connectors.daemon_requests import DaemonRequest, RequestTools
from kvferry.connectors.worker_session import Sessions
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


async def rank_0(socket: str, seconds: float = 10) -> DaemonClient:
    return await DaemonClient.connect(socket, ROLE, FACTS, "0", deadline_s=seconds, rank=OneRank(0, 2, "e", ROLE))


async def opened_by_rank_1(socket: str) -> Sessions:
    """Its connector's sessions, one after the other."""

    async def connect(*, deadline_s: float) -> DaemonClient:
        own = OneRank(1, 2, "e", ROLE)
        return await DaemonClient.connect(socket, ROLE, FACTS, "1", deadline_s=deadline_s, rank=own)

    async def quiet() -> None: ...

    settled = asyncio.Event()
    settled.set()
    sessions = Sessions(connect, quiet=quiet, changed=lambda there: None, settled=settled)
    await sessions.open(10)
    return sessions


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


def test_ranks_wait_for_each_other_longer_than_for_their_daemon(stack: Stack) -> None:
    async def run() -> None:
        _, socket = daemon(stack, 2)
        waiting = asyncio.create_task(rank_0(socket, 1.0))
        await asyncio.sleep(2.0)
        sessions = await opened_by_rank_1(socket)
        await asyncio.gather((await waiting).close(), sessions.close())

    asyncio.run(run())


def test_an_engine_of_many_ranks_is_one_worker_of_the_bound(stack: Stack) -> None:
    async def run() -> None:
        await closed(await ranks_of(daemon(stack, 8)[1], 8, "e"))

    asyncio.run(run())


def test_a_rank_whose_session_broke_declines_what_it_had_opened(stack: Stack) -> None:
    """Rank 0 comes to the same order only in the next session, and does not wait for rank 1's word in vain."""

    async def run() -> None:
        _, socket = daemon(stack, 2)
        first, sessions = await asyncio.gather(rank_0(socket), opened_by_rank_1(socket))
        name, words = new_name(), {**Prompt(40, 1).words, "prefill": "", "max_new_tokens": 1}
        tools = cast(RequestTools, SimpleNamespace(sessions=sessions, failed=lambda request, error: None))

        async def give_up(client: DaemonClient, name: RequestName) -> None:
            await client.abort(name, "it is wanted no more")

        async def load() -> None:
            async with DaemonRequest(tools, "r", name, give_up) as lease:
                await lease.client.admit(name, **words, deadline_s=60)

        loading = asyncio.create_task(load())
        await asyncio.sleep(0.3)
        first._stream.frames.abort()
        await asyncio.wait_for(loading, 10)
        await first.close()
        await asyncio.sleep(1.5)  # until the proof that the engine of the session before writes no more
        again = await rank_0(socket)
        began = time.monotonic()
        with pytest.raises(RequestFailed, match="rank 1 of the engine has aborted it"):
            await again.admit(name, **words, deadline_s=60)
        assert time.monotonic() - began < 5, "it waits for a rank that will not come with it"
        await again.abort(name, "")
        await asyncio.gather(again.close(), sessions.close())

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
