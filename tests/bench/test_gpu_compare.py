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
    monkeypatch.setattr(compare, "processes", lambda cluster: {"decode daemon": [os.getpid()]})
    assert compare.gpu_memory(None) == {"decode daemon": 300}
