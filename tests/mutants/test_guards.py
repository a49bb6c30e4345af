"""Every guard is still in the code where its description says; `python -m tests.mutants` breaks them."""

from tests.mutants.guards import GUARDS
from tests.mutants.tree import ROOT


def test_a_guard_is_where_it_says() -> None:
    wrong = []
    for guard in GUARDS:
        try:
            changed = guard.broken(ROOT) != (ROOT / guard.file).read_text()
        except Exception as error:  # the other guards are looked at, too
            wrong.append(f"{guard.name}: {type(error).__name__}: {error}")
            continue
        if not changed:
            wrong.append(f"{guard.name}: {guard.file} is the same without it")
        gone = [test for test in guard.tests if not (ROOT / test.split("::")[0]).exists()]
        wrong += [f"{guard.name}: {test} is not there" for test in gone]
    assert not wrong, "\n".join(wrong)


def test_names_are_distinct() -> None:
    names = [guard.name for guard in GUARDS]
    assert len(names) == len(set(names))
