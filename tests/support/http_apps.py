"""HTTP applications served on the loopback, for as long as a test wants them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn

from kvferry.front.server import QuietServer, listen


class QuickServer(QuietServer):
    """Looks ten times as often whether it is to end."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(app: object) -> AsyncIterator[str]:
    listener = listen("127.0.0.1", 0)
    server = QuickServer(uvicorn.Config(app, lifespan="off", log_level="error", timeout_graceful_shutdown=1))  # type: ignore[arg-type]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()
