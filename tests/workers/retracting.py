"""A model during whose steps the daemon takes the request back: a retraction at exactly that step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from kvferry.client.client import DaemonClient
from kvferry.client.requests import DaemonGone, RequestFailed, RequestName, Retracted
from kvferry.workers.models.interface import Compute, Prompt, SequenceCompute
from kvferry.workers.models.sampling import Sampling
from tests.support.fake_daemon import FakeDaemon


class Retracting:
    """`at`: positions from the prompt's start; a retraction arrives while the token there, of prompt or output, is
    computed. Each comes once, to the request that was admitted last."""

    def __init__(self, compute: Compute, daemon: FakeDaemon, client: DaemonClient, at: set[int]) -> None:
        self._compute = compute
        self._daemon = daemon
        self._client = client
        self._loop = asyncio.get_running_loop()
        self.at = at

    @property
    def vocabulary(self) -> int:
        return self._compute.vocabulary

    def sequence(
        self,
        prompt: Prompt,
        pages: Sequence[int],
        sampling: Sampling,
        *,
        shared_tokens: int,
        asked: Prompt | None = None,
    ) -> RetractingSequence:
        sequence = self._compute.sequence(prompt, pages, sampling, shared_tokens=shared_tokens, asked=asked)
        return RetractingSequence(sequence, self.pass_positions)

    def pass_positions(self, start: int, end: int) -> None:
        """In the compute thread."""
        if not (passed := {position for position in self.at if start <= position < end}):
            return
        self.at -= passed
        name = self._daemon.last("admit").admit.name
        self._loop.call_soon_threadsafe(self._daemon.retract, name)
        deadline = time.monotonic() + 10
        while not self._retracted(RequestName.from_proto(name)):
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def _retracted(self, name: RequestName) -> bool:
        try:
            self._client.check_kept(name)
        except (Retracted, RequestFailed, DaemonGone):
            return True
        return False


class RetractingSequence:
    def __init__(self, sequence: SequenceCompute, passing: Callable[[int, int], None]) -> None:
        self._passing = passing
        self.add_pages = sequence.add_pages
        self.resume = sequence.resume
        self.first_token = sequence.first_token
        self.check_first_token = sequence.check_first_token
        self.finish = sequence.finish
        self._sequence = sequence

    def prompt(self, start: int, end: int) -> None:
        self._passing(start, end)
        self._sequence.prompt(start, end)

    def step(self, token: int, position: int) -> int:
        self._passing(position, position + 1)
        return self._sequence.step(token, position)
