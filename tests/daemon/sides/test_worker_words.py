"""What a worker may say before it holds its lock: nothing of requests, whose pages it could write unseen."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.services.worker import WorkerService
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire

ABORT = wire.WorkerMessage(abort=wire.Abort())
ATTACHED = wire.WorkerMessage(attached=wire.Attached())


def read(*messages: wire.WorkerMessage) -> list[str]:
    """The kinds that reached the side; a worker's word that it holds its lock is believed."""
    handled: list[str] = []
    says = iter([*messages, None])

    async def next_message() -> object:
        return next(says)

    def attach(worker: Any) -> None:
        worker.attached = True

    side = SimpleNamespace(
        workers=SimpleNamespace(attach=attach), hear=lambda worker, kind, message: handled.append(kind)
    )
    worker = SimpleNamespace(attached=False, quiesced=False)
    context = SimpleNamespace(read=next_message)
    telling = cast(Any, SimpleNamespace(hears=lambda kind, message: None))
    asyncio.run(WorkerService({}, "")._read(cast(Any, side), cast(Any, worker), telling, cast(Any, context)))
    return handled


def test_one_that_has_attached_is_heard() -> None:
    assert read(ATTACHED, ABORT) == ["abort"]


def test_one_that_has_not_is_refused() -> None:
    with pytest.raises(RequestError, match="abort before attached") as refused:
        read(ABORT, ATTACHED)
    assert refused.value.code == common.ERROR_FAILED_PRECONDITION
