"""Random walks of a rule-based machine without Hypothesis: longer lives than it gives, and some times faster.

Rules take indexes modulo what is there, so that any subsequence of a walk is a walk: one that fails is shortened by
leaving steps out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from hypothesis.stateful import RULE_MARKER, Rule, RuleBasedStateMachine

Draws = Mapping[str, Callable[[Random], Any]]  # by the name of a rule's argument


class Step(NamedTuple):
    rule: str
    arguments: dict[str, Any]

    def __repr__(self) -> str:
        return f"{self.rule}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


def _rules(machine: type[RuleBasedStateMachine]) -> dict[str, Rule]:
    found = {name: getattr(getattr(machine, name), RULE_MARKER, None) for name in dir(machine)}
    return {name: rule for name, rule in found.items() if rule is not None}


def draw_steps(
    machine: type[RuleBasedStateMachine], random: Random, count: int, draws: Draws, weights: Mapping[str, int]
) -> list[Step]:
    """`weights`: of those rules that are not to have weight 2."""
    rules = _rules(machine)
    names = random.choices(list(rules), [weights.get(name, 2) for name in rules], k=count)
    return [Step(name, {key: draws[key](random) for key in rules[name].arguments}) for name in names]


def walk(machine: RuleBasedStateMachine, steps: Sequence[Step], check: Callable[[], None]) -> int:
    """Takes those steps whose preconditions hold; returns how many. The error tells where it went wrong."""
    rules = _rules(type(machine))
    taken = 0
    for number, step in enumerate(steps):
        rule = rules[step.rule]
        if all(precondition(machine) for precondition in rule.preconditions):
            try:
                rule.function(machine, **step.arguments)
                check()
            except Exception as error:  # whatever it is, it is the step that failed
                raise AssertionError(f"in step {number}, {step}: {error!r}") from error
            taken += 1
    return taken


def shorten(steps: Sequence[Step], fails: Callable[[Sequence[Step]], bool]) -> list[Step]:
    """A walk that still fails; none of its steps can be left out."""
    left, size = list(steps), max(1, len(steps) // 2)
    while True:
        before, at = len(left), 0
        while at < len(left):
            shorter = left[:at] + left[at + size :]
            if fails(shorter):
                left = shorter
            else:
                at += size
        if size > 1:
            size //= 2
        elif len(left) == before:
            return left
