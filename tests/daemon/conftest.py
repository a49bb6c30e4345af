"""Machines of one test are built on by another: pytest's importlib mode leaves sys.path alone."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
