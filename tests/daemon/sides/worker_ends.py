"""A listener to the ends of workers."""

from __future__ import annotations

import asyncio

from kvferry.daemon.sides.workers import Worker


class WorkerEnds:
    def __init__(self) -> None:
        self.gone = asyncio.Event()

    def worker_left(self, worker: Worker) -> None:
        pass

    def worker_lost(self, worker: Worker) -> None:
        pass

    def worker_gone(self, worker: Worker) -> None:
        self.gone.set()
