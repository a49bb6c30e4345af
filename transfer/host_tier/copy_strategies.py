"""Names of the ways in which pages are moved between a pool and the host tier, which of them is forced, and the counts
of what was moved by each. Nothing here needs the extension."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

Strategy = Literal["batch", "loop", "kernel", "staged", "pitched"]
"""Of a GPU: see `kvferry.transfer.host_tier.copy_plan`."""

STRATEGIES: tuple[Strategy, ...] = ("batch", "loop", "kernel", "staged", "pitched")
MEMCPY = "memcpy"  # of the CPU, for pools in shared memory
AUTO = "auto"
ENVIRONMENT = "KVFERRY_COPY"


def check_environment(environment: Mapping[str, str] = os.environ, *, on_gpus: bool) -> None:
    """ValueError where `KVFERRY_COPY` is no strategy, or none of such a pool. A GPU's does nothing to a pool in shared
    memory."""
    name = _said(environment)
    if on_gpus and name == MEMCPY:
        choices = ", ".join((AUTO, *STRATEGIES))
        raise ValueError(f"{ENVIRONMENT} is {MEMCPY}, the CPU's copies, but the pool is on GPUs: it must be {choices}")


def from_environment(environment: Mapping[str, str] = os.environ) -> Strategy | None:
    """The strategy that `KVFERRY_COPY` wants for every copy of a GPU; None if it is not set, or `auto`. ValueError: no
    strategy, or none of a GPU."""
    check_environment(environment, on_gpus=True)
    name = _said(environment)
    return None if name == AUTO else cast(Strategy, name)


def _said(environment: Mapping[str, str]) -> str:
    name = environment.get(ENVIRONMENT, AUTO) or AUTO
    choices = (AUTO, *STRATEGIES, MEMCPY)
    if name not in choices:
        raise ValueError(f"{ENVIRONMENT} is {name[:64]!r}; it must be {', '.join(choices)}")
    return name


@dataclass(frozen=True, slots=True)
class StrategyCounts:
    """Counts of what was moved by one strategy, ever."""

    copies: int = 0
    descriptors: int = 0
    """Runs of bytes that were named to whoever moves them."""
    bytes: int = 0

    def __add__(self, other: StrategyCounts) -> StrategyCounts:
        return StrategyCounts(
            self.copies + other.copies, self.descriptors + other.descriptors, self.bytes + other.bytes
        )


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """Counts by the strategy that moved the bytes in the end, and how often another one than was chosen did, by why."""

    strategies: Mapping[str, StrategyCounts] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    forced: str = AUTO

    def __add__(self, other: CopyStatistics) -> CopyStatistics:
        """The sum of both; `forced` is the other's, which is the later one."""
        strategies, fallbacks = dict(self.strategies), dict(self.fallbacks)
        for name, counts in other.strategies.items():
            strategies[name] = strategies.get(name, StrategyCounts()) + counts
        for reason, count in other.fallbacks.items():
            fallbacks[reason] = fallbacks.get(reason, 0) + count
        return CopyStatistics(strategies, fallbacks, other.forced)
