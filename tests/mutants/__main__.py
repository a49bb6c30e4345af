"""python -m tests.mutants [--only WORD] [--table FILE] [--keep FOLDER]: breaks guards one at a time, and runs the tests
of their room.

Each line says whether a test failed ("killed", and which one) or none did ("SURVIVED"). The run fails where a guard
survives without a written reason, is not in the code any more, or where the tests fail with every guard whole.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.guard import Guard, NoLongerApplies
from tests.mutants.guards import GUARDS
from tests.mutants.tree import Tree

TEST_SECONDS = 600.0  # of one guard's tests
WHOLE_SECONDS = 3600.0  # of all of them, with every guard whole
TOO_LONG = 124
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one guard's mutant."""

    word: str  # killed, SURVIVED, survived (with a reason), or why there is none
    detail: str
    good: bool


def run_tests(tree: Tree, tests: tuple[str, ...], seconds: float) -> tuple[int, str]:
    """pytest's exit status, that of `timeout` for a run that took too long, and what it printed."""
    command = [str(tree.python), "-m", "pytest", "-x", "-q", "-m", "not nightly", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree.root, capture_output=True, text=True, timeout=seconds, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return TOO_LONG, ""
    return done.returncode, done.stdout


def judged(tree: Tree, guard: Guard) -> Verdict:
    """Breaks the guard, runs its tests and makes it whole again."""
    try:
        tree.apply(guard)
        code, said = run_tests(tree, guard.tests, TEST_SECONDS)
    except NoLongerApplies as error:
        return Verdict("does not apply", str(error), good=False)
    except subprocess.CalledProcessError as error:
        return Verdict("does not build", error.stdout[-1000:], good=False)
    finally:
        tree.restore(guard)
    found = FAILED.search(said)
    if found and (code == 1 or code < 0):  # C++ may take the process down behind its first failure
        return Verdict("killed", found[1], good=True)
    if code < 0:
        return Verdict("killed", f"its tests end with signal {-code}", good=True)
    if code == TOO_LONG:
        return Verdict("killed", f"its tests did not end within {TEST_SECONDS:g} s", good=True)
    if code == 0:
        return Verdict("survived" if guard.reason else "SURVIVED", guard.reason, good=bool(guard.reason))
    return Verdict("does not run", f"pytest ended with {code}: {said[-300:]}", good=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="guards whose name or file has this word")
    parser.add_argument("--table", type=Path, help="write the table there, too")
    parser.add_argument("--keep", type=Path, help="the copy and its build lie there, and are there for the next run")
    args = parser.parse_args()
    chosen = [guard for guard in GUARDS if args.only in guard.name or args.only in guard.file]
    if not chosen:  # pytest without a path would run every test
        parser.error(f"no guard's name or file has {args.only!r}")
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    with tempfile.TemporaryDirectory(prefix="kvferry-mutants-") as folder:
        tree = Tree((args.keep or Path(folder)).resolve())
        if any(guard.compiled for guard in chosen):
            tree.build_whole()
        tests = tuple(dict.fromkeys(test for guard in chosen for test in guard.tests))
        code, said = run_tests(tree, tests, WHOLE_SECONDS)
        if code != 0:
            print(said[-3000:], f"the tests fail with every guard whole (exit status {code})", sep="\n")
            return 1
        verdicts = []
        for guard in sorted(chosen, key=lambda guard: (guard.compiled, guard.file)):  # of one file only that is built
            began = time.monotonic()
            verdict = judged(tree, guard)
            verdicts.append(verdict)
            seconds = time.monotonic() - began
            say(f"{verdict.word:<14} {guard.name:<60} {guard.file}:{guard.symbol}  {verdict.detail}  {seconds:.0f} s")
    killed = sum(verdict.word == "killed" for verdict in verdicts)
    say(f"{len(verdicts)} guards: {killed} killed, {sum(not verdict.good for verdict in verdicts)} to be looked at")
    if args.table is not None:
        args.table.write_text("\n".join(["python -m tests.mutants", *lines]) + "\n")
    return 0 if all(verdict.good for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
