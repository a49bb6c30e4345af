"""A decoding request's pages for output: asked for ahead, so that no step waits for the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.client.client import DaemonClient
from kvferry.waiting import complete
from kvferry.workers.models.interface import SequenceCompute
from kvferry.workers.orders import DecodeOrder


@dataclass(slots=True)
class Room:
    """The pages of a request that grows: more are asked for half a page ahead."""

    client: DaemonClient
    order: DecodeOrder
    sequence: SequenceCompute
    pages: int
    growing: asyncio.Task[tuple[int, ...]] | None = field(default=None)

    async def for_token(self, position: int) -> None:
        """Returns when there is a page for the token at `position`. Raises Retracted when there will be none."""
        page_size = self.client.geometry.page_size
        capacity = self.pages * page_size
        most = len(self.order.prompt.tokens) + self.order.max_new_tokens - 1
        if self.growing is None and capacity < most and position + page_size // 2 >= capacity:
            wanted = min(capacity + page_size, most)
            self.growing = asyncio.create_task(self.client.grow(self.order.name, wanted))
        if position >= capacity:
            assert self.growing is not None, f"position {position} of {self.order.name} is behind the promise of {most}"
            pages: Sequence[int] = await self.growing
            self.growing = None
            self.sequence.add_pages(pages)
            self.pages += len(pages)
            assert position < self.pages * page_size

    async def close(self) -> None:
        """Forgets an answer that is still to come: what follows ends the request."""
        if self.growing is not None:
            self.growing.cancel()
            await complete(asyncio.gather(self.growing, return_exceptions=True))
