"""An engine with blocks of its own, as far as a daemon sees it: memory in shared memory or on a GPU, and a session."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.client.client import DaemonClient
from kvferry.client.engine_blocks import OwnBlocks, make_block_files
from kvferry.client.engine_pools import EnginePools
from kvferry.client.one_rank import OneRank
from kvferry.client.requests import Admitted, Patience, RequestName
from kvferry.connectors.blocks import BlockMap
from kvferry.connectors.gpu_blocks import registered
from kvferry.proto import common_pb2, worker_pb2
from kvferry.radix.digests import root_digest
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.transfer.geometry.namespace import NamespaceFacts
from kvferry.transfer.geometry.rank_lanes import rank_geometry
from tests.support.rank_clients import RankClients
from tests.support.reshard import heads_of_rank

PAGE = 16
GEOMETRY = KVGeometry(2, 1, 4, "float32", PAGE, Layout.ENGINE)
CANARY = 0xCA


@dataclass(frozen=True)
class Share:
    """Ranks that share a model's heads. A token has some bytes for each layer and run, and in them head by head; where
    heads have runs of their own, each has a place for each of these, else all of a rank's have one together."""

    geometry: KVGeometry = GEOMETRY
    ranks: int = 1
    apart: bool = False  # each rank has a session of its own

    @property
    def facts(self) -> NamespaceFacts:
        return NamespaceFacts("blocks", "1", self.geometry, "sha256_cbor", root_digest(), engine_layout="places")

    @property
    def planes(self) -> int:
        return self.geometry.layers * (self.geometry.head_runs or self.geometry.tensors)

    @property
    def places(self) -> int:
        """Of each rank."""
        own = rank_geometry(self.geometry, self.ranks)
        return self.planes * (own.kv_heads if own.head_runs else 1)

    @property
    def token_bytes(self) -> int:
        """In each place."""
        return rank_geometry(self.geometry, self.ranks).token_bytes // self.places

    def of_rank(self, token: bytes, rank: int) -> NDArray[np.uint8]:
        """A token's bytes in this rank's places, (places, bytes)."""
        by_head = np.frombuffer(token, np.uint8).reshape(self.planes, self.geometry.kv_heads, -1)
        return by_head[:, heads_of_rank(self.geometry, self.ranks, rank)].reshape(self.places, -1)


FACTS = Share().facts


@dataclass(frozen=True)
class Prompt:
    """Tokens of which a number says all: those of `first` are in common with other prompts that begin so."""

    tokens: int
    number: int
    shared: int = 0  # tokens, a multiple of the page size, that prompts of number 0 have, too

    def token(self, index: int, geometry: KVGeometry) -> bytes:
        """Its KV in all layers."""
        number = 0 if index < self.shared else self.number
        return hashlib.shake_128(f"{number} {index}".encode()).digest(geometry.token_bytes)

    @property
    def digests(self) -> bytes:
        pages = range(self.tokens // PAGE)
        numbers = [0 if (page + 1) * PAGE <= self.shared else self.number for page in pages]
        return b"".join(
            hashlib.sha256(f"page {n} {page}".encode()).digest() for page, n in zip(pages, numbers, strict=True)
        )

    @property
    def words(self) -> dict[str, object]:
        tail = hashlib.sha256(f"tail {self.number} {self.tokens}".encode()).digest() if self.tokens % PAGE else b""
        return {"digests": self.digests, "tokens": self.tokens, "tail_digest": tail}


@dataclass
class BlockEngine:
    """`blocks` blocks of `block_tokens`, each filled with canaries while nobody has it."""

    role: str
    socket: str
    block_tokens: int
    blocks: int
    device: str = "cpu"
    share: Share = field(default_factory=Share)
    client: DaemonClient | RankClients = field(init=False)
    memories: list[Any] = field(init=False)  # of each rank: as `memory`
    free: list[int] = field(init=False)

    @property
    def memory(self) -> Any:
        """The first rank's: uint8, (places, blocks, tokens, bytes); an array, or a tensor on a GPU."""
        return self.memories[0]

    async def connect(self) -> BlockEngine:
        memories, own = self._allocated()
        shape = self.share.places, self.blocks, self.block_tokens, self.share.token_bytes
        self.memories = [memory.reshape(shape) for memory in memories]
        for memory in self.memories:
            memory[:] = CANARY
        self._written()
        self.free = list(range(self.blocks))
        role = common_pb2.ROLE_PREFILL if self.role == "prefill" else common_pb2.ROLE_DECODE
        facts = self.share.facts.to_proto()
        connect, name = partial(DaemonClient.connect, self.socket, role, facts), f"{self.role} engine"
        if self.share.apart:
            engine = os.urandom(8).hex()
            ranks = [OneRank(rank, self.share.ranks, engine, role) for rank in range(self.share.ranks)]
            opened = (connect(name, own=each, rank=rank) for each, rank in zip(own, ranks, strict=True))
            self.client = RankClients(await asyncio.gather(*opened))
        else:
            self.client = await connect(name, own=own[0])
        assert self.client.welcome.pages == self.blocks
        return self

    def _allocated(self) -> tuple[list[Any], list[EnginePools]]:
        """The memory of each rank, and what each session registers."""
        share, count = self.share, self.share.places
        if share.apart:
            own = [self._one_rank() for _ in range(share.ranks)]
            return [each.pools.memories[0] for each in own], own
        if self.device == "cpu":
            made = (share.geometry, self.block_tokens, self.blocks, [count], "/dev/shm", share.ranks)
            own = make_block_files(*made)
            return list(own.pools.memories), [own]
        import torch

        assert share.ranks == 1, "one GPU"
        nbytes = self.block_tokens * share.token_bytes
        memory = torch.empty(count * self.blocks * nbytes, dtype=torch.uint8, device=self.device)
        bases = memory.data_ptr() + np.arange(count, dtype=np.int64) * self.blocks * nbytes
        order = np.repeat(np.arange(self.block_tokens, dtype=np.int32), share.token_bytes)
        strides = np.full(count, nbytes, np.int64)
        per_page = PAGE // self.block_tokens
        places = BlockMap(bases, strides, nbytes, self.blocks, self.block_tokens, per_page, order)
        return [memory], [registered(places, share.geometry, memory.device.index)]

    def _one_rank(self) -> EnginePools:
        """What one rank registers: memory of its own share, in a session of the whole model's."""
        assert self.device == "cpu"
        own = rank_geometry(self.share.geometry, self.share.ranks)
        made = make_block_files(own, self.block_tokens, self.blocks, [self.share.places], "/dev/shm")
        pools = OwnBlocks(self.share.geometry, self.blocks, made.pools.memories)
        return EnginePools(pools, made._registration, made._files)

    def _written(self) -> None:
        """Waits until what was written to the memory is there."""
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize(self.device)

    def held(self, rank: int = 0) -> NDArray[np.uint8]:
        """A copy of a rank's memory, as it is now."""
        memory = self.memories[rank]
        copy: NDArray[np.uint8] = np.array(memory if self.device == "cpu" else memory.cpu())
        return copy

    def _token(self, prompt: Prompt, index: int, rank: int) -> NDArray[np.uint8]:
        return self.share.of_rank(prompt.token(index, self.share.geometry), rank)

    def take(self, tokens: int) -> list[int]:
        """Blocks for so many tokens; not one behind the other."""
        count = -(-tokens // self.block_tokens)
        taken = self.free[::2][:count]
        if len(taken) < count:
            taken += [block for block in self.free if block not in taken][: count - len(taken)]
        assert len(taken) == count, "too few blocks for the test"
        self.free = [block for block in self.free if block not in taken]
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        for memory in self.memories:
            for block in blocks:
                memory[:, block] = CANARY
        self._written()
        self.free += blocks

    def compute(self, prompt: Prompt, blocks: Sequence[int], start: int, end: int) -> None:
        for rank in range(self.share.ranks):
            whole = self.held(rank)
            for index in range(start, end):
                block, token = divmod(index, self.block_tokens)
                whole[:, blocks[block], token] = self._token(prompt, index, rank)
            for block in blocks[start // self.block_tokens : -(-end // self.block_tokens)]:
                self._put(rank, block, whole[:, block])
        self._written()

    def _put(self, rank: int, block: int, content: NDArray[np.uint8]) -> None:
        if self.device == "cpu":
            self.memories[rank][:, block] = content
        else:
            import torch

            self.memories[rank][:, block] = torch.from_numpy(content.copy()).to(self.device)

    def wrong(self, prompt: Prompt, blocks: Sequence[int], start: int, end: int) -> list[int]:
        """Tokens in [start, end) whose bytes are not right on every rank; blocks[0] begins at `start`."""
        wrong = set[int]()
        for rank in range(self.share.ranks):
            held = self.held(rank)
            for index in range(start, end):
                block, token = divmod(index - start, self.block_tokens)
                if not np.array_equal(held[:, blocks[block], token], self._token(prompt, index, rank)):
                    wrong.add(index)
        return sorted(wrong)

    def touched(self) -> list[int]:
        """Blocks that nobody has and somebody has written."""
        held = [self.held(rank) for rank in range(self.share.ranks)]
        return [block for block in self.free if not all((each[:, block] == CANARY).all() for each in held)]

    # -- prefill

    async def push(
        self,
        prompt: Prompt,
        name: RequestName,
        *,
        chunk: int = PAGE,
        end: bool = True,
        before_last: Callable[[], Awaitable[object]] | None = None,
    ) -> list[int]:
        """Computes the prompt, and says so chunk by chunk, the last one behind `before_last`. Its blocks, which are the
        daemon's until it has ended."""
        blocks = self.take(prompt.tokens)
        first = -(-min(chunk, prompt.tokens) // self.block_tokens)
        self.client.begin(name, **prompt.words, deadline_s=20, blocks=blocks[:first])  # type: ignore[arg-type]
        await self.client.begun(name)
        named = first
        for start in range(0, prompt.tokens, chunk):
            done = min(start + chunk, prompt.tokens)
            if before_last is not None and done == prompt.tokens:
                await before_last()
            self.compute(prompt, blocks, start, done)
            upto = -(-done // self.block_tokens)
            self.client.progress(name, done, blocks[named:upto])
            named = max(named, upto)
        self.client.aux(name, b"first")
        if end:
            await self.client.ended(name, 20)
            self.give_back(blocks)
        return blocks

    async def fetch_and_push(
        self,
        client: DaemonClient | RankClients,
        prompt: Prompt,
        name: RequestName,
        blocks: Sequence[int],
        *,
        deadline_s: float = 20,
        ended_s: float = 20,
    ) -> int:
        """Has what it can fetched into the blocks, and computes the rest: as the engine, or as one rank of it. The
        tokens that have come."""
        offered = asyncio.get_running_loop().create_future()

        def proceed(tokens: int) -> None:  # each rank hears it
            if not offered.done():
                offered.set_result(tokens)

        patience = Patience(worker_pb2.PATIENCE_FETCH, 0, proceed)
        client.begin(name, **prompt.words, deadline_s=deadline_s, patience=patience)  # type: ignore[arg-type]
        begun = asyncio.ensure_future(client.begun(name))
        try:
            await asyncio.wait({offered, begun}, return_when=asyncio.FIRST_COMPLETED)
            named = -(-offered.result() // self.block_tokens) if offered.done() else 0
            if named:
                client.fetch(name, blocks[:named], 0)
            matched = (await begun).matched_tokens
        finally:
            begun.cancel()
            await asyncio.gather(begun, return_exceptions=True)
        assert self.wrong(prompt, blocks, 0, matched) == []
        self.compute(prompt, blocks, matched, prompt.tokens)
        client.progress(name, prompt.tokens, blocks[named if matched else 0 :])
        client.aux(name, b"first")
        await client.ended(name, ended_s)
        return matched

    # -- decode

    async def fetch(
        self, prompt: Prompt, name: RequestName, blocks: Sequence[int], start: int, prefill: str
    ) -> Admitted:
        """Has tokens [start, ...) of the prompt in these blocks."""
        held = start // PAGE * PAGE
        admitted = await self.client.admit(
            name,
            **prompt.words,  # type: ignore[arg-type]
            prefill=prefill,
            max_new_tokens=1,
            deadline_s=20,
            held_tokens=held,
            blocks=blocks,
            blocks_from=start,
        )
        await self.client.ready(name)
        await self.client.finish(name, tokens=prompt.tokens, digests=b"")
        return admitted

    async def store(self, prompt: Prompt, blocks: Sequence[int]) -> None:
        """Hands the prompt's full pages in, from the first of these blocks on."""
        name = new_name()
        full = Prompt(prompt.tokens // PAGE * PAGE, prompt.number, prompt.shared)
        await self.client.admit(
            name,
            **full.words,  # type: ignore[arg-type]
            prefill="",
            max_new_tokens=1,
            deadline_s=20,
            held_tokens=full.tokens,
            blocks=blocks[: full.tokens // self.block_tokens],
        )
        await self.client.ready(name)
        await self.client.finish(name, tokens=full.tokens, digests=b"")


def new_name() -> RequestName:
    return RequestName(os.urandom(16), 1)
