"""An engine with blocks of its own, as far as a daemon sees it: memory in shared memory or on a GPU, and a session."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.client.client import DaemonClient
from kvferry.client.engine_blocks import make_block_file
from kvferry.client.engine_pools import EnginePools
from kvferry.client.requests import Admitted, RequestName
from kvferry.connectors.blocks import BlockMap
from kvferry.connectors.gpu_blocks import registered
from kvferry.proto import common_pb2
from kvferry.radix.digests import root_digest
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.transfer.geometry.namespace import NamespaceFacts

PAGE, PLACES = 16, 4
GEOMETRY = KVGeometry(2, 1, 4, "float32", PAGE, Layout.ENGINE)
TOKEN_BYTES = GEOMETRY.page_bytes // PAGE // PLACES  # in each place
FACTS = NamespaceFacts("blocks", "1", GEOMETRY, "sha256_cbor", root_digest(), engine_layout="places")
CANARY = 0xCA


@dataclass(frozen=True)
class Prompt:
    """Tokens of which a number says all: those of `first` are in common with other prompts that begin so."""

    tokens: int
    number: int
    shared: int = 0  # tokens, a multiple of the page size, that prompts of number 0 have, too

    def token(self, index: int) -> bytes:
        """Its KV in all places, (PLACES * TOKEN_BYTES,)."""
        number = 0 if index < self.shared else self.number
        made = hashlib.sha256(f"{number} {index}".encode()).digest() * (PLACES * TOKEN_BYTES // 32 + 1)
        return made[: PLACES * TOKEN_BYTES]

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
    client: DaemonClient = field(init=False)
    memory: Any = field(init=False)  # uint8, (places, blocks, tokens, bytes): an array, or a tensor on a GPU
    free: list[int] = field(init=False)

    async def connect(self) -> BlockEngine:
        memory, own = self._allocated()
        self.memory = memory.reshape(PLACES, self.blocks, self.block_tokens, TOKEN_BYTES)
        self.memory[:] = CANARY
        self._written()
        self.free = list(range(self.blocks))
        role = common_pb2.ROLE_PREFILL if self.role == "prefill" else common_pb2.ROLE_DECODE
        self.client = await DaemonClient.connect(self.socket, role, FACTS.to_proto(), f"{self.role} engine", own=own)
        assert self.client.welcome.pages == self.blocks
        return self

    def _allocated(self) -> tuple[Any, EnginePools]:
        if self.device == "cpu":
            own = make_block_file(GEOMETRY, self.block_tokens, self.blocks, PLACES, "/dev/shm")
            return own.pools.memories[0], own
        import torch

        nbytes = self.block_tokens * TOKEN_BYTES
        memory = torch.empty(PLACES * self.blocks * nbytes, dtype=torch.uint8, device=self.device)
        bases = memory.data_ptr() + np.arange(PLACES, dtype=np.int64) * self.blocks * nbytes
        order = np.repeat(np.arange(self.block_tokens, dtype=np.int32), TOKEN_BYTES)
        strides = np.full(PLACES, nbytes, np.int64)
        per_page = PAGE // self.block_tokens
        places = BlockMap(bases, strides, nbytes, self.blocks, self.block_tokens, per_page, order)
        return memory, registered(places, GEOMETRY, memory.device.index)

    def _written(self) -> None:
        """Waits until what was written to the memory is there."""
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize(self.device)

    def held(self) -> NDArray[np.uint8]:
        """A copy of the memory, as it is now."""
        copy: NDArray[np.uint8] = np.array(self.memory if self.device == "cpu" else self.memory.cpu())
        return copy

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
        for block in blocks:
            self.memory[:, block] = CANARY
        self._written()
        self.free += blocks

    def compute(self, prompt: Prompt, blocks: Sequence[int], start: int, end: int) -> None:
        whole = self.held()
        for index in range(start, end):
            block, token = divmod(index, self.block_tokens)
            whole[:, blocks[block], token] = np.frombuffer(prompt.token(index), np.uint8).reshape(PLACES, -1)
        for block in blocks[start // self.block_tokens : -(-end // self.block_tokens)]:
            self._put(block, whole[:, block])
        self._written()

    def _put(self, block: int, content: NDArray[np.uint8]) -> None:
        if self.device == "cpu":
            self.memory[:, block] = content
        else:
            import torch

            self.memory[:, block] = torch.from_numpy(content.copy()).to(self.device)

    def wrong(self, prompt: Prompt, blocks: Sequence[int], start: int, end: int) -> list[int]:
        """Tokens in [start, end) whose bytes are not right; blocks[0] begins at `start`."""
        wrong, held = [], self.held()
        for index in range(start, end):
            block, token = divmod(index - start, self.block_tokens)
            want = np.frombuffer(prompt.token(index), np.uint8).reshape(PLACES, -1)
            if not np.array_equal(held[:, blocks[block], token], want):
                wrong.append(index)
        return wrong

    def touched(self) -> list[int]:
        """Blocks that nobody has and somebody has written."""
        held = self.held()
        return [block for block in self.free if not (held[:, block] == CANARY).all()]

    # -- prefill

    async def push(self, prompt: Prompt, name: RequestName, *, chunk: int = PAGE, end: bool = True) -> list[int]:
        """Computes the prompt, and says so chunk by chunk. Its blocks, which are the daemon's until it has ended."""
        blocks = self.take(prompt.tokens)
        first = -(-min(chunk, prompt.tokens) // self.block_tokens)
        await self.client.begin(name, **prompt.words, deadline_s=20, blocks=blocks[:first])  # type: ignore[arg-type]
        named = first
        for start in range(0, prompt.tokens, chunk):
            done = min(start + chunk, prompt.tokens)
            self.compute(prompt, blocks, start, done)
            upto = -(-done // self.block_tokens)
            self.client.progress(name, done, blocks[named:upto])
            named = max(named, upto)
        self.client.aux(name, b"first")
        if end:
            await self.client.ended(name, 20)
            self.give_back(blocks)
        return blocks

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
