"""Types of command-line flags, for argparse: its error then names the flag, the bound and the value."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def is_whole(text: str, digits: int) -> bool:
    """Whether it is a number of so many digits at most: of ASCII, and never more than `int` takes."""
    return re.fullmatch(f"[0-9]{{1,{digits}}}", text) is not None


def at_least(bound: int) -> Callable[[str], int]:
    """A whole number."""

    def parse(text: str) -> int:
        if not is_whole(text, 20) or int(text) < bound:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {bound}, got {text!r}")
        return int(text)

    return parse


whole = at_least(1)
whole_or_0 = at_least(0)


def not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text!r}")
    return value


def positive(text: str) -> float:
    value = not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"must be > 0, got {text!r}")
    return value


def parsed(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """A type of flags that `parse` reads; its ValueError says what is wrong, which argparse would not show."""

    def checked(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def devices(text: str) -> tuple[int, ...]:
    """The GPU of each rank: `cpu`: (); `cuda`: (0,); `cuda:0,cuda:1`: (0, 1). ValueError."""
    if text == "cpu":
        return ()
    found = [re.fullmatch(r"cuda(?::([0-9]{1,2}))?", part.strip()) for part in text.split(",")]
    numbers = tuple(int(match.group(1) or 0) for match in found if match is not None)
    if len(numbers) < len(found):
        raise ValueError(
            f"is {text[:64]!r}; it must be cpu, or cuda:I for each rank with commas between (cuda is cuda:0)"
        )
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"is {text[:64]!r}; it names a GPU twice")
    return numbers


def device(text: str) -> str:
    """The device by torch's name, which keeps `cuda` and `cuda:0` apart."""
    return "cuda:0" if text == "cuda" else text
