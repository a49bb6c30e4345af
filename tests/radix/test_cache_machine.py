"""Tree, pools, tiers, requests, quotas and pins against the naive model, step by step, over real bytes.

Hypothesis draws short lives and shortens what fails; it prints the steps, and a blob by which they are replayed. Walks
are long lives of one world; what fails is shortened here, and the seed and the steps that are left are printed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.radix.cache_machine.machine import CacheMachine
from tests.radix.cache_machine.walk import Draws, Step, draw_steps, shorten, walk

NIGHTLY_STEPS = 100_000  # of each kind


def few(random: Random) -> int:
    return random.choice([0, 1, 2, random.randint(0, 6)])


def pages(random: Random) -> int:
    return random.choice([random.randint(1, 4), random.randint(1, 12), random.randint(1, 40)])


def symbols(random: Random) -> tuple[int, ...]:
    return tuple(random.randint(0, 2) for _ in range(random.randint(0, 6)))


def index(random: Random) -> int:
    return random.randrange(16)


def mask(random: Random) -> int:
    return random.getrandbits(16)


DRAWS: Draws = {
    "base": index,
    "batches": lambda random: random.randint(1, 3),
    "cut": lambda random: random.randrange(4),
    "failing": lambda random: random.choice([0, 0, mask(random), mask(random) & mask(random)]),
    "flip": lambda random: random.random() < 0.5,
    "growth": few,
    "index": index,
    "keep": lambda random: random.choice([-1, random.getrandbits(60)]),
    "kind": index,
    "order": mask,
    "output": symbols,
    "pages": pages,
    "patient": lambda random: random.random() < 0.5,
    "seconds": lambda random: random.randint(0, 6),
    "side": index,
    "suffix": symbols,
    "which": lambda random: random.choice([-1, mask(random)]),
}
WEIGHTS = {
    "abort_restoring": 5,
    "advance": 5,
    "arrive": 6,
    "end_copies": 1,
    "end_copy": 10,
    "finish": 7,
    "flush": 1,
    "follow": 3,
    "look": 1,
    "open": 6,
    "press": 3,
    "restart": 1,
    "serve": 10,
    "spill": 1,
    "time_passes": 3,
    "write_through": 3,
}


def test_short_lives() -> None:
    _draw(examples=40, steps=60)


def test_long_lives() -> None:
    for _ in range(4):
        _walk(secrets.randbits(32), 2000)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_short_lives(capsys: pytest.CaptureFixture[str]) -> None:
    CacheMachine.steps, begun = 0, time.monotonic()
    while CacheMachine.steps < NIGHTLY_STEPS:
        _draw(examples=200, steps=100)
    with capsys.disabled():
        print(f"\n{CacheMachine.steps} steps in {time.monotonic() - begun:.0f} s")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_long_lives(capsys: pytest.CaptureFixture[str]) -> None:
    taken, begun = 0, time.monotonic()
    while taken < NIGHTLY_STEPS:
        taken += _walk(secrets.randbits(32), 2000)
    with capsys.disabled():
        print(f"\n{taken} steps in {time.monotonic() - begun:.0f} s")


def _draw(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=False,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def _walk(seed: int, count: int) -> int:
    """Returns how many of the steps were taken: of most rules there is not always something to do."""
    steps = draw_steps(CacheMachine, Random(seed), count, DRAWS, WEIGHTS)
    try:
        return _live(seed, steps)
    except AssertionError:
        pass

    def fails(some: Sequence[Step]) -> bool:
        try:
            _live(seed, some)
        except AssertionError:
            return True
        return False

    left = shorten(steps, fails)
    print(f"seed {seed}:", *left, sep="\n    ")
    _live(seed, left)
    raise AssertionError("what has failed does not fail again")


def _live(seed: int, steps: Sequence[Step]) -> int:
    machine = CacheMachine()
    machine.begin(Random(seed))
    print(machine.world.setup)
    taken = walk(machine, steps, machine.holds)
    machine.teardown()
    return taken
