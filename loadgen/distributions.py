"""Random numbers of a workload: constant, uniform, lognormal, Zipf or Poisson, as words of a flag or as a JSON object.

As words: `40`, `uniform:10,20`, `lognormal:mean=5.5,sigma=0.8,max=4000`, `lognormal:average=300,ratio=0.85`,
`zipf:alpha=1.5,max=100`, `poisson:alpha=8`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

MEDIAN_RATIO = 0.85  # of median to average of a lognormal distribution that is given by its average alone
LARGEST = 1 << 30


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """A source of random numbers, the same for the same seed and purpose."""
    text = " ".join(map(str, (seed, *purpose)))
    return np.random.default_rng(np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype="<u4"))


_UNUSED = np.random.default_rng(0)


def generator_for(sizes: Sequence[Distribution], seed: int, *purpose: str | int) -> np.random.Generator:
    """A generator to draw these from. Constants draw nothing: none is made for them, which would cost a load generator
    more than all else that it does about a conversation."""
    return _UNUSED if all(isinstance(size, Constant) for size in sizes) else generator(seed, *purpose)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of numbers. Raises ValueError, when made, naming the parameter, its value and its bound."""

    FIELDS: ClassVar[Mapping[str, float | None]] = {}  # parameters, with the default of those that may be left out

    def sample(self, source: np.random.Generator) -> float:
        raise NotImplementedError

    def count(self, source: np.random.Generator, least: int) -> int:
        """A sample, rounded, at least `least`."""
        return max(least, round(self.sample(source)))

    def __str__(self) -> str:
        values = [f"{name}={getattr(self, name):g}" for name in self.FIELDS if getattr(self, name) != LARGEST]
        return f"{type(self).__name__.lower()}:{','.join(values)}"


@dataclass(frozen=True, slots=True)
class Constant(Distribution):
    FIELDS: ClassVar[Mapping[str, float | None]] = {"value": None}
    value: float

    def __post_init__(self) -> None:
        _bound("value", self.value, 0)

    def __str__(self) -> str:
        return f"{self.value:g}"

    def sample(self, source: np.random.Generator) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform(Distribution):
    FIELDS: ClassVar[Mapping[str, float | None]] = {"min": None, "max": None}
    min: float
    max: float

    def __post_init__(self) -> None:
        _bound("min", self.min, 0)
        _bound("max", self.max, self.min)

    def sample(self, source: np.random.Generator) -> float:
        if self.min == int(self.min) and self.max == int(self.max):  # whole numbers, both ends included
            return float(source.integers(int(self.min), int(self.max) + 1))
        return float(source.uniform(self.min, self.max))


@dataclass(frozen=True, slots=True)
class Lognormal(Distribution):
    """A lognormal distribution; `mean` and `sigma` are those of the logarithm."""

    FIELDS: ClassVar[Mapping[str, float | None]] = {"mean": None, "sigma": None, "max": LARGEST}
    mean: float
    sigma: float
    max: float = LARGEST

    def __post_init__(self) -> None:
        _bound("sigma", self.sigma, 0)
        _bound("max", self.max, 0)

    @classmethod
    def of_average(cls, average: float, ratio: float, largest: float) -> Lognormal:
        """The distribution with this average. `ratio`: of the median to the average."""
        _bound("average", average, 1)
        if not 0 < ratio < 1:
            raise ValueError(f"ratio must be above 0 and below 1, got {ratio:g}")
        return cls(math.log(average * ratio), math.sqrt(-2 * math.log(ratio)), largest)

    def sample(self, source: np.random.Generator) -> float:
        return min(self.max, float(source.lognormal(self.mean, self.sigma)))


@dataclass(frozen=True, slots=True)
class Zipf(Distribution):
    FIELDS: ClassVar[Mapping[str, float | None]] = {"alpha": None, "max": LARGEST}
    alpha: float
    max: float = LARGEST

    def __post_init__(self) -> None:
        if not self.alpha > 1:
            raise ValueError(f"alpha must be > 1, got {self.alpha:g}")
        _bound("max", self.max, 1)

    def sample(self, source: np.random.Generator) -> float:
        return min(self.max, float(source.zipf(self.alpha)))


@dataclass(frozen=True, slots=True)
class Poisson(Distribution):
    FIELDS: ClassVar[Mapping[str, float | None]] = {"alpha": None, "max": LARGEST}
    alpha: float
    max: float = LARGEST

    def __post_init__(self) -> None:
        _bound("alpha", self.alpha, 0)
        _bound("max", self.max, 0)

    def sample(self, source: np.random.Generator) -> float:
        return min(self.max, float(source.poisson(self.alpha)))


KINDS: Mapping[str, type[Distribution]] = {
    "constant": Constant,
    "uniform": Uniform,
    "lognormal": Lognormal,
    "zipf": Zipf,
    "poisson": Poisson,
}


def parse(text: str) -> Distribution:
    """Raises ValueError."""
    kind, colon, words = text.partition(":")
    if not colon:
        kind, words = "constant", text
    names = [*KINDS[kind].FIELDS] if kind in KINDS else []
    given: dict[str, float] = {}
    for i, word in enumerate(words.split(",")):
        name, equals, value = word.partition("=")
        if not equals:
            name, value = (names[i] if i < len(names) else f"parameter {i + 1}"), word
        try:
            given[name] = float(value)
        except ValueError:
            raise ValueError(f"{name} must be a number, got {value!r}") from None
    return make(kind, given)


def make(kind: str, given: Mapping[str, float]) -> Distribution:
    """The distribution of that kind, from parameters by name. Raises ValueError."""
    if kind not in KINDS:
        raise ValueError(f"distribution must be one of {', '.join(KINDS)}, got {kind!r}")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
            raise ValueError(f"{kind}: {name} must be a number of at most {LARGEST}, got {value!r}")
    given = dict(given)
    if kind == "lognormal" and "average" in given:
        ratio = given.pop("median_ratio", given.pop("ratio", MEDIAN_RATIO))
        average, largest = given.pop("average"), given.pop("max", LARGEST)
        _all_known(kind, given, {})
        return Lognormal.of_average(average, ratio, largest)
    fields = KINDS[kind].FIELDS
    _all_known(kind, given, fields)
    lacking = [name for name, default in fields.items() if default is None and name not in given]
    if lacking:
        raise ValueError(f"{kind}: {lacking[0]} is missing")
    return KINDS[kind](**given)


def _all_known(kind: str, given: Mapping[str, float], fields: Mapping[str, float | None]) -> None:
    unknown = [name for name in given if name not in fields]
    if unknown:
        raise ValueError(f"{kind} has no parameter {unknown[0]!r}")


def _bound(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name} must be >= {least:g}, got {value:g}")
