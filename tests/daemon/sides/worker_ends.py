"""A listener to the ends of workers."""

from __future__ import annotations

import asyncio

from kvferry.daemon.sides.workers import Worker


class WorkerEnds:
    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.told: list[tuple[str, int]] = []  # in order

    def worker_left(self, worker: Worker) -> None:
        self.told.append(("left", worker.number))

    def worker_lost(self, worker: Worker) -> None:
        self.told.append(("lost", worker.number))

    def worker_gone(self, worker: Worker) -> None:
        self.told.append(("gone", worker.number))
        self.gone.set()
