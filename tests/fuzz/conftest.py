"""Lets these tests be imported as `tests.fuzz`, as `python -m tests.fuzz` has them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
