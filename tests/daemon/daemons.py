"""Daemons in this process, and their settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.server import Daemon

PAGE = 16


def config_of(folder: Path, **fields: Any) -> DaemonConfig:
    values = {"role": "decode", "shm_dir": str(folder), "page_size": PAGE, "pool_bytes": 1 << 20, "metrics": ""}
    return DaemonConfig(**{**values, "listen": "127.0.0.1:0", "socket": str(folder / "d.sock"), **fields})


@asynccontextmanager
async def started(config: DaemonConfig) -> AsyncIterator[Daemon]:
    """A daemon that its user ends."""
    daemon = Daemon(config)
    try:
        await daemon.start()
        yield daemon
    finally:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(None)
