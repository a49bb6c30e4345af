"""The sessions of an engine whose ranks are processes of their own, used as if they were one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvferry.client.client import DaemonClient
from kvferry.client.requests import Admitted, Begun, Ready, RequestName
from kvferry.proto import worker_pb2


class RankClients:
    """Says on each rank's session what the engine's one session would. All of them are told the same."""

    def __init__(self, clients: Sequence[DaemonClient]) -> None:
        self.clients = clients

    @property
    def welcome(self) -> worker_pb2.Welcome:
        return self.clients[0].welcome

    async def _all(self, method: str, *args: Any, **words: Any) -> Any:
        answers = await asyncio.gather(*(getattr(client, method)(*args, **words) for client in self.clients))
        assert all(answer == answers[0] for answer in answers), f"{method}: ranks were told {answers}"
        return answers[0]

    async def admit(self, name: RequestName, **words: Any) -> Admitted:
        answer: Admitted = await self._all("admit", name, **words)
        return answer

    async def ready(self, name: RequestName) -> Ready:
        answer: Ready = await self._all("ready", name)
        return answer

    async def finish(self, name: RequestName, **words: Any) -> None:
        await self._all("finish", name, **words)

    def begin(self, name: RequestName, **words: Any) -> None:
        for client in self.clients:
            client.begin(name, **words)

    def fetch(self, name: RequestName, blocks: Sequence[int], held_tokens: int) -> None:
        for client in self.clients:
            client.fetch(name, blocks, held_tokens)

    async def begun(self, name: RequestName) -> Begun:
        answer: Begun = await self._all("begun", name)
        return answer

    def progress(self, name: RequestName, tokens: int, blocks: Sequence[int] = ()) -> None:
        for client in self.clients:
            client.progress(name, tokens, blocks)

    def aux(self, name: RequestName, blob: bytes) -> None:
        for client in self.clients:
            client.aux(name, blob)

    async def ended(self, name: RequestName, deadline_s: float) -> None:
        await self._all("ended", name, deadline_s)

    async def abort(self, name: RequestName, reason: str) -> None:
        await self._all("abort", name, reason)

    async def close(self) -> None:
        await self._all("close")
