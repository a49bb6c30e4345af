"""Lets these tests import their tables by name: pytest's importlib mode leaves sys.path alone."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "limits"), str(TESTS / "workers"), str(TESTS / "front")]
