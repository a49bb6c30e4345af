"""The comparison of connectors on GPUs: what it keeps of a run, and the table that it makes; no server runs here."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from tests.bench.scripts import imported

MODULES = ("gpu_compare", "cluster", "gpu_turns", "chat", "engine_threads")
GPUS = [f"cuda:{number}" for number in range(4)]


@pytest.fixture(scope="module")
def compare() -> Iterator[ModuleType]:
    with imported("vllm", MODULES) as modules:
        yield modules.gpu_compare


def test_the_table_says_which_model_and_where_its_ranks_were(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "qwen3-32b-60"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 60}))
    monkeypatch.setenv("VLLM_MODEL", str(model))
    monkeypatch.setattr(compare, "DEVICES", GPUS)
    monkeypatch.setattr(compare, "gpus", lambda: "4 GPUs")
    args = argparse.Namespace(output=str(tmp_path / "rows.json"), ranks="2:4", first=8192, more=512, turns=6)
    told = {"P e2e": [30.0], "kvferry bytes": [4.0 * (1 << 20)], "kvferry loads": [2.0], "kvferry load seconds": [0.05]}
    got = compare.Measured(first_ms=[250.0], ttft_ms=[70.0, 74.0], between_ms=[7.0], second_ms=[30.0], told=told)
    row = {"system": "blocks", "key": asdict(compare.Key("all", "young", 1, 16, "2:4")), "got": asdict(got)}
    old = {**row, "system": "nixl", "memory": {"prefill": 1024}}  # of a run before processors were counted
    new = {
        **row,
        "memory": {"prefill": 2048, "prefill daemon": 1024},
        "cores": {"prefill": 1.5, "prefill daemon": 0.25},
    }
    for each in (old, new):
        compare.keep(args, each)
    monkeypatch.setattr(sys, "argv", ["-", "table", str(tmp_path / "rows.json"), "--output", str(tmp_path / "table")])
    assert compare.main() == 0
    table = (tmp_path / "table").read_text()
    for line in (
        "qwen3-32b-60: Qwen3ForCausalLM, 60 layers",
        "ranks 2:4: prefill on cuda:0, cuda:1, decode on cuda:1, cuda:2, cuda:0, cuda:3",
        "1 at a time, 16 tokens out, decode cache all, young, ranks 2:4: turns 2 and later",
    ):
        assert line in " ".join(table.split())
    (blocks,) = [line for line in table.splitlines() if line.startswith("│ blocks")]
    assert "42.0" in blocks and "load 25.0" in blocks and "72.0 (70-74)" in blocks
    words = " ".join(table.split())
    assert "prefill daemon" in words and "0.25" in words
    capsys.readouterr()


def test_memory_of_a_process_is_that_on_all_its_gpus(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = tmp_path / "nvidia-smi"
    shown.write_text(f"#!/bin/sh\nprintf '{os.getpid()}, 100\\n1, 7\\n{os.getpid()}, 200\\n'\n")
    shown.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(compare, "DEVICES", GPUS)
    monkeypatch.setattr(compare, "processes", lambda cluster: {"decode daemon": [os.getpid()]})
    assert compare.gpu_memory(None) == {"decode daemon": 300}


ONE_VLLM = {"D TTFT": 40.0, "D queue": 1.0, "D prefill": 30.0}
PREFILL = {"P e2e": 31.0, "P queue": 2.0, "P prefill": 26.0}


@pytest.mark.parametrize(
    ("told", "ttft", "steps"),
    [
        (ONE_VLLM, 44.0, [4.0, 0.0, 0.0, 0.0, 0.0, 9.0, 1.0, 30.0]),
        ({**ONE_VLLM, **PREFILL}, 75.0, [4.0, 3.0, 2.0, 26.0, 0.0, 9.0, 1.0, 30.0]),
        ({**PREFILL, "load": 29.0, "D TTFT": 40.0, "D queue": 33.0, "D prefill": 2.0}, 44.0,
         [4.0, 0.0, 2.0, 26.0, 1.0, 5.0, 4.0, 2.0]),
        ({**PREFILL, "load": 29.0, "D TTFT": 40.0, "D queue": 33.0, "D prefill": 0.0}, 35.0,
         [4.0, 3.0, 2.0, 26.0, 0.0, 0.0, 0.0, 0.0]),
    ],
    ids=["one vLLM", "legs in series", "legs at once", "prefill's token at once"],
)  # fmt: skip
def test_steps_to_a_first_token_follow_each_other(
    compare: ModuleType, told: dict[str, float], ttft: float, steps: list[float]
) -> None:
    found = compare.steps_of(told, ttft)
    assert list(found.items()) == list(zip(compare.STEPS, steps, strict=True))
    assert sum(found.values()) == ttft


def test_the_table_of_steps_has_a_column_for_each_system_whose_timers_are_known(compare: ModuleType) -> None:
    load = {"kvferry loads": [2.0, 2.0], "kvferry load seconds": [0.05, 0.07], "gather": [0.4, 0.6]}
    timers = {**PREFILL, "D TTFT": 40.0, "D queue": 33.0, "D prefill": 2.0}
    kvferry = {**load, **{name: [value, value] for name, value in timers.items()}}
    visits = {
        "alone": [compare.Visit(compare.Measured(ttft_ms=[50.0]), {}, {})],  # of a run before they were kept
        "kvferry": [compare.Visit(compare.Measured(ttft_ms=[40.0, 44.0, 46.0, 50.0], told=kvferry), {}, {})],
    }
    assert compare.milliseconds(visits["kvferry"])["hand-off"] == pytest.approx(30.0 - 28.0)
    table = compare.shown_steps(compare.Key("all", "young", 1, 16), visits)
    assert [column.header for column in table.columns] == ["step", "kvferry"]
    cells = dict(zip(*(column.cells for column in table.columns), strict=True))
    assert (cells["hand-off"], cells["all"], cells["  of it, gather"]) == ("2.0", "45.0", "0.5")
    assert "P front end" not in cells, "no row of zeros"
