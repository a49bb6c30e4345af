"""Every guard is still in the code where its description says; `python -m tests.mutants` breaks them."""

import pytest

from tests.mutants.guard import Guard
from tests.mutants.guards import GUARDS
from tests.mutants.tree import ROOT


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_is_where_it_says(guard: Guard) -> None:
    assert guard.broken(ROOT) != (ROOT / guard.file).read_text()
    for test in guard.tests:
        assert (ROOT / test.split("::")[0]).exists(), test


def test_names_are_distinct() -> None:
    names = [guard.name for guard in GUARDS]
    assert len(names) == len(set(names))
