"""Verdicts of bench/gpu/proofs.py on a claim that holds, on one that does not, and on what it expects; without a
GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.bench.scripts import imported

SCRIPTS = ("proofs", "nodes", "actor", "driver")


@pytest.fixture(scope="module")
def proofs() -> Iterator[ModuleType]:
    with imported("gpu", SCRIPTS) as modules:
        yield modules.proofs


def ran(proofs: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status and the lines of `unlocked`."""
    on = MagicMock()
    on.size.side_effect = lambda nbytes: nbytes
    on.node.return_value.call.return_value = (0, b"")
    on.board = []
    monkeypatch.setattr(proofs, "bench", lambda options: contextlib.nullcontext(on))
    monkeypatch.setattr(sys, "argv", ["proofs.py", "--only", "unlocked"])
    return proofs.main(), capsys.readouterr().out


@pytest.mark.parametrize(
    ("exited", "status", "said"),
    [(80.0, 0, "lock's end 12 (as expected), after the process's 0: holds"), (20.0, 1, "the process's 12: VIOLATED")],
)
def test_what_lands_behind_the_lock_is_expected_and_behind_the_end_is_not(
    proofs: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    exited: float,
    status: int,
    said: str,
) -> None:
    monkeypatch.setattr(proofs, "killed_worker", lambda *_: proofs.Ends(30.0, 30.1, 0.5, exited))
    code, text = ran(proofs, monkeypatch, capsys)
    assert code == status, text
    assert text.count(said) == 2, text
    assert ("VIOLATED" in text) == (status == 1)


def test_a_proof_that_does_not_run_proves_nothing(
    proofs: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise proofs.NodeError("nothing changed")

    monkeypatch.setattr(proofs, "killed_worker", fail)
    code, text = ran(proofs, monkeypatch, capsys)
    assert code == 1 and "unlocked: did not run: NodeError: nothing changed" in text
