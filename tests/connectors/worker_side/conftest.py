"""One pair of engines' halves for the tests of a file."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.connectors.worker_side.engine_pair import PAGE, PER_PAGE, Pair, exchange, new_name, new_prompt
from tests.support.devices import DeviceStack


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with DeviceStack() as stack:
        made = Pair(stack)
        try:
            prompt, name = new_prompt(PAGE), new_name()
            for _ in range(20):  # until the daemons' session is up
                exchange(made, f"first {_}", name, prompt, range(PER_PAGE), range(PER_PAGE))
                if made.sides["decode"].moved.loads:
                    break
                time.sleep(0.3)
                name = new_name()
            yield made
        finally:
            for side in made.sides.values():
                side.close()
