"""One decode worker before a daemon with a cache that takes its requests back, and what is to be seen of that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.client.client import DaemonClient
from kvferry.proto import common_pb2, engine_pb2, worker_pb2
from kvferry.radix.digests import prompt_digests
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.workers.models.interface import Compute, Prompt
from kvferry.workers.models.synthetic import SimulatedTime, SyntheticCompute, arrived_tail, output_token, page_content
from tests.support.fake_daemon import FakeDaemon
from tests.support.worker_stack import WorkerStack, worker_stack
from tests.workers.retracting import Retracting

PAGE = 4
GEOMETRY = KVGeometry(layers=2, kv_heads=1, head_dim=4, dtype="float32", page_size=PAGE, layout=Layout.PAGE_NHD)
Scenario = Callable[[FakeDaemon, WorkerStack, Retracting], Awaitable[None]]
KEEP: dict[str, Callable[[int], int]] = {
    "all": lambda full: full,
    "half": lambda full: full // 2,
    "nothing": lambda full: 0,
}


def run(
    folder: Path,
    scenario: Scenario,
    *,
    at: set[int],
    keep: str = "all",
    geometry: KVGeometry = GEOMETRY,
    compute: Callable[[DaemonClient], Compute] | None = None,
    step_s: float = 0.0,
) -> None:
    def synthetic(client: DaemonClient) -> Compute:
        return SyntheticCompute(client.pools, SimulatedTime(decode_step_s=step_s))

    async def session() -> None:
        facts = common_pb2.NamespaceFacts(model="m", geometry=geometry.to_proto())
        retracting: list[Retracting] = []
        async with FakeDaemon(folder, geometry, pages=1100) as daemon:
            daemon.keep = KEEP[keep]

            def make(client: DaemonClient) -> Retracting:
                retracting.append(Retracting((compute or synthetic)(client), daemon, client, set(at)))
                return retracting[0]

            async with worker_stack(daemon.socket, common_pb2.ROLE_DECODE, facts, make_compute=make) as stack:
                await asyncio.wait_for(scenario(daemon, stack, retracting[0]), 60)
                while len(stack.jobs):
                    await asyncio.sleep(0.01)
                assert stack.client.open_requests == 0

    asyncio.run(session())


def order(tokens: list[int], new_tokens: int, **fields: Any) -> engine_pb2.DecodeRequest:
    name = common_pb2.RequestName(request_id=os.urandom(16), attempt=1)
    return engine_pb2.DecodeRequest(name=name, tokens=tokens, max_new_tokens=new_tokens, **fields)


async def decode(stack: WorkerStack, request: engine_pb2.DecodeRequest) -> list[engine_pb2.DecodeReply]:
    return [reply async for reply in stack.engine.Decode(request)]


def tokens_of(replies: list[engine_pb2.DecodeReply]) -> list[int]:
    return [token for reply in replies for token in reply.generated.tokens]


def prompt_of(tokens: list[int]) -> Prompt:
    array = np.array(tokens, dtype=np.uint32)
    digests = prompt_digests(array, page_size=PAGE)
    return Prompt(array, digests.digests, digests.tail)


def output_of(tokens: list[int], count: int) -> list[int]:
    return [output_token(prompt_of(tokens), index) for index in range(count)]


def admits(daemon: FakeDaemon) -> list[worker_pb2.Admit]:
    return [message.admit for message in daemon.received if message.HasField("admit")]


def finishes(daemon: FakeDaemon) -> list[worker_pb2.Finish]:
    return [message.finish for message in daemon.received if message.HasField("finish")]


def check_words(daemon: FakeDaemon, prompt: list[int], output: list[int]) -> None:
    """Each stay admits prompt + output so far, and finishes what of that and of its own has its KV in the pool."""
    whole = prompt + output
    for admit, finish in zip(admits(daemon), finishes(daemon), strict=True):
        begun = prompt_of(whole[: admit.tokens])
        assert (admit.digests, admit.tail_digest) == (begun.digests, begun.tail_digest)
        assert admit.tokens + admit.max_new_tokens == len(whole)
        assert admit.digests + finish.digests == prompt_of(whole[: finish.tokens]).digests
        assert admit.name == admits(daemon)[0].name
    for finish, again in zip(finishes(daemon), admits(daemon)[1:], strict=False):
        assert again.tokens == finish.tokens + 1  # the last token's KV is computed in the next stay
        assert again.prefill == ""
    assert finishes(daemon)[-1].tokens == len(whole) - 1


def fill(daemon: FakeDaemon, prompt: list[int]) -> None:
    """What a transfer brings into the first pages."""
    made = prompt_of(prompt)
    for index in range(len(prompt) // PAGE):
        daemon.pool[index] = page_content(made.digests[index * 32 : index * 32 + 32], GEOMETRY.page_bytes)
    if made.tail_digest:
        daemon.pool[len(prompt) // PAGE] = arrived_tail(made.tail_digest, len(prompt) % PAGE, GEOMETRY)
