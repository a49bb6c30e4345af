"""Loads of vLLM's other connectors, where MultiConnector has some beside this one. It tells a child neither that it is
one nor what another loads: the scheduler then counts tokens as computed that the engine did not hold and that were not
promised here."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


class OtherLoads:
    """`asked`, `allocated`, `ended` as vLLM calls the connector, `step` for each step, `received` for its reports."""

    def __init__(self) -> None:
        self.awaits_step = False  # `step` has anything to do
        self.within_steps = False  # some were: whether they failed is known when their step is over, to vLLM alone
        self._held: dict[str, int] = {}  # tokens that the engine had when it asked
        self._allocated: list[tuple[Request, int]] = []  # since the last step, and the tokens that are accounted for
        self._under_way: set[str] = set()

    def asked(self, request: Request, held: int) -> None:
        self._held[request.request_id] = held

    def allocated(self, request: Request, ours: int) -> None:
        """`ours` of its tokens are to come from here."""
        if (held := self._held.pop(request.request_id, None)) is not None:
            self._allocated.append((request, held + ours))
            self.awaits_step = True

    def step(self, scheduled: Container[str]) -> bool:
        """The requests that this step computes: no load into their blocks is under way. Whether another has loaded, or
        begun to, since the last one."""
        seen = False
        if self._under_way:
            self._under_way = {request for request in self._under_way if request not in scheduled}
        for request, accounted in self._allocated:
            if request.num_computed_tokens <= accounted:
                continue
            seen = True
            if request.request_id in scheduled:
                self.within_steps = True
            else:
                self._under_way.add(request.request_id)
        self._allocated.clear()
        self.awaits_step = bool(self._under_way)
        return seen

    def received(self, requests: Iterable[str]) -> None:
        """Their loads are over, whoever's."""
        self._under_way.difference_update(requests)

    def ended(self, request: Request) -> bool:
        """The request is over; whether another connector may still write into its blocks."""
        self._held.pop(request.request_id, None)
        loading = request.request_id in self._under_way
        self._under_way.discard(request.request_id)
        return loading
