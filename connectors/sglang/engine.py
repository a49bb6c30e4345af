"""The engine that a manager is made for: SGLang's queue, with its pool of KV, its scheduler and its metadata rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_queues: list[Any] = []
_managers: list[Any] = []


@contextmanager
def being_made(queue: Any) -> Iterator[None]:
    """A manager is made for this queue within; on the thread of its scheduler, one at a time."""
    _queues.append(queue)
    try:
        yield
    finally:
        _queues.pop()


def queue_of_manager() -> Any:
    """The queue that a manager is being made for. RuntimeError where SGLang makes it in another way."""
    if not _queues:
        raise RuntimeError("kvferry's manager is made outside of _init_kv_manager: its plugin's hooks were not applied")
    return _queues[-1]


def use(manager: Any) -> None:
    """This process serves with it from now on."""
    _managers.append(manager)


def manager_of(tree: Any) -> Any | None:
    """The manager of the decode engine that has this radix cache; None: it is another's."""
    return next((manager for manager in _managers if manager.tree is tree), None)


def in_use() -> bool:
    return bool(_managers)
