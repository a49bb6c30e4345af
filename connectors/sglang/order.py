"""Who goes first where several prompts wait. Decode takes in first those that its pool holds, which cost it next to
no room and no copy; in the order of their coming they would be evicted by those before them. Prefill computes first
what decode has asked for: so both are at the same prompts, and no page of decode's waits for prefill's queue to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.client.requests import RequestName
from kvferry.connectors.sglang.radix_locks import UnknownTree, locked_prefix
from kvferry.connectors.sglang.stores import names_beside

MOST_ASKED = 8192  # names; each prompt has a place of its own in the daemon's table, of fewer
OVERTAKEN = (
    64  # prompts that decode takes in meanwhile: then one that its pool does not hold goes with those that it does
)


class AskedNames:
    """Names that a decode daemon has asked for, the last ones. Any thread's."""

    def __init__(self) -> None:
        self._names: dict[RequestName, None] = {}

    def add(self, name: RequestName) -> None:
        self._names[name] = None
        if len(self._names) > MOST_ASKED:
            del self._names[next(iter(self._names))]

    def __contains__(self, name: RequestName) -> bool:
        return name in self._names


def asked_first(requests: Sequence[Any], agree: Callable[[list[bool]], list[bool]]) -> list[Any]:
    """SGLang's prompts that wait for prefill, else in their order. `agree`: of each whether all ranks say so."""
    asked = agree([getattr(request.disagg_kv_sender, "asked", True) for request in requests])
    return [
        request
        for wanted in (True, False)
        for request, is_asked in zip(requests, asked, strict=True)
        if is_asked is wanted
    ]


@dataclass(slots=True)
class QueuePlace:
    """A prompt's among those that wait for decode."""

    number: int  # in the order of their coming
    taken: int  # prompts that decode had taken in before
    is_held: bool | None = None  # by decode's pool, most of it; None: nobody has looked


class HeldFirst:
    """The order of decode's queue. All ranks of an engine come to the same."""

    def __init__(self) -> None:
        self._came = 0

    def arrange(self, queue: Any) -> None:
        """Puts SGLang's DecodePreallocQueue in order, each time before it takes prompts in."""
        ours = [each for each in queue.queue if hasattr(each.kv_receiver, "turn")]  # the others warm SGLang up
        new = [each for each in ours if each.kv_receiver.turn is None]
        taken = self._came - (len(ours) - len(new))
        for each in new:
            self._came += 1
            each.kv_receiver.turn = QueuePlace(self._came, taken)
        if len(ours) > 1 and not getattr(queue.tree_cache, "disable", True):
            places = {id(each): self._place(each, queue.tree_cache, taken) for each in ours}
            queue.queue.sort(key=lambda each: places.get(id(each), (False, 0)))

    def _place(self, each: Any, tree: Any, taken: int) -> tuple[bool, int]:
        turn: QueuePlace = each.kv_receiver.turn
        if turn.is_held is None and each.kv_receiver.asks_first:
            turn.is_held = _is_held(each.req, tree)
        return not turn.is_held and taken - turn.taken < OVERTAKEN, turn.number


def _is_held(request: Any, tree: Any) -> bool:
    try:
        kept = locked_prefix(tree, request.origin_input_ids, names_beside(request), float("inf"))
    except UnknownTree:
        return False
    if kept is None:
        return False
    kept.let_go()
    return 2 * len(kept.slots) >= len(request.origin_input_ids)
