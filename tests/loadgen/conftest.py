"""Runs of the load generator in this process."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests/conftest.py froze is not thawed by a run's end: the next collections would look at all of it."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
