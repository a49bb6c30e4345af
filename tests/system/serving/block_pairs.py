"""A prefill and a decode daemon before engines that have blocks of their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from kvferry.daemon.cli.stack import Stack
from tests.support import devices as real
from tests.support.block_engine import PAGE, BlockEngine, Prompt, Share, new_name
from tests.support.engines import side_stats

SLOT_BYTES = 4096 + 64
BLOCK_TOKENS = 8, 4  # of prefill's blocks and of decode's
BLOCKS = 40, 96


def need(*devices: str) -> None:
    """Skips where one of these GPUs is not there."""
    for device in devices:
        if device != "cpu":
            real.need(int(device.removeprefix("cuda:")))


class Pair:
    """A prefill and a decode daemon over blocks of unlike sizes."""

    def __init__(
        self,
        stack: Stack,
        *flags: str,
        host: Sequence[str] = ("--host-bytes", "1MiB"),
        devices: tuple[str, str] = ("cpu", "cpu"),
        shares: tuple[Share, Share] = (Share(), Share()),
        blocks: tuple[int, int] = BLOCKS,
    ) -> None:
        """host: decode's flags for its host tier; blocks: how many each engine has."""
        self.stack = stack
        sockets = {role: os.path.join(stack.folder, f"{role}.sock") for role in ("prefill", "decode")}
        listen = ["--listen", "127.0.0.1:0"]
        common = [
            "--page-size",
            str(PAGE),
            "--pool",
            "engine",
            "--slot-bytes",
            str(SLOT_BYTES),
        ]
        common += flags
        words = ["serve", "--role", "prefill", "--name", "p", "--socket", sockets["prefill"], *common]
        words += ["--ranks", str(shares[0].ranks), "--device", devices[0]]
        self.prefill_daemon = stack.start("prefill", [*words, *listen])
        address = stack.ready(self.prefill_daemon)
        self.words = {"prefill": [*words, "--listen", address]}
        words = ["serve", "--role", "decode", "--name", "d", "--socket", sockets["decode"], *common, *listen]
        words += ["--device", devices[1], "--peer", f"p={address}", *host, "--ranks", str(shares[1].ranks)]
        self.words["decode"] = words
        self.decode_daemon = stack.start("decode", words)
        stack.ready(self.decode_daemon)
        self.prefill = BlockEngine("prefill", sockets["prefill"], BLOCK_TOKENS[0], blocks[0], devices[0], shares[0])
        self.decode = BlockEngine("decode", sockets["decode"], BLOCK_TOKENS[1], blocks[1], devices[1], shares[1])

    async def __aenter__(self) -> Pair:
        await self.prefill.connect()
        await self.decode.connect()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.decode.client.close()
        await self.prefill.client.close()

    async def hand_over(self, prompt: Prompt, start: int = 0, chunk: int = PAGE) -> tuple[list[int], int]:
        """Returns decode's blocks from token `start` on, and the tokens that its daemon held."""
        name = new_name()
        blocks = self.decode.take(prompt.tokens - start)
        _, admitted = await asyncio.gather(
            self.prefill.push(prompt, name, chunk=chunk), self.decode.fetch(prompt, name, blocks, start, "p")
        )
        assert self.decode.wrong(prompt, blocks, start, prompt.tokens) == []
        assert not self.decode.touched() and not self.prefill.touched()
        return blocks, admitted.matched_tokens


async def session_up(*engines: BlockEngine) -> None:
    """Each engine's daemon has all of its sessions, at least one: the two ends of one are not up at the same moment."""
    for engine in engines:
        while {peer.state for peer in side_stats(engine.socket).peers} != {"up"}:
            await asyncio.sleep(0.02)
