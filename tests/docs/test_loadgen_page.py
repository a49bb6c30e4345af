"""docs/loadgen.md has a description of an engine that can be pasted, and a table of all its fields."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from kvferry.workers.models.engine_model import EngineModel, read_engine_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "loadgen.md").read_text()


def test_the_engine_is_that_of_the_benchmarks(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    pasted = tmp_path / "engine.json"
    pasted.write_text(block)
    assert read_engine_model(pasted) == read_engine_model(ROOT / "bench" / "e2e" / "engine_8b.json")


def test_the_table_has_every_field() -> None:
    (table,) = re.findall(r"^\| field of the description \|.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(field.name for field in fields(EngineModel))
