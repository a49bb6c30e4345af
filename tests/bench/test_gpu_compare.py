"""The comparison of connectors on GPUs: what it keeps of a run, and the table that it makes; no server runs here."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from bench import charts
from tests.bench.scripts import imported

MODULES = ("gpu_compare", "cluster", "gpu_tables", "gpu_turns", "chat", "engine_threads", "versions")
GPUS = [f"cuda:{number}" for number in range(4)]


@pytest.fixture(scope="module")
def compare() -> Iterator[ModuleType]:
    with imported("vllm", MODULES) as modules:
        yield modules.gpu_compare


def test_blocks_that_hold_no_longest_prompt_are_refused(
    compare: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would not start, and say so in its log alone."""
    monkeypatch.setattr(sys, "argv", ["-", "run", "--output", "-", "--at-once", "1", "--first", "8000", "--turns", "2"])
    with pytest.raises(SystemExit):
        compare.main()
    told = "--max-model-len is 16384; the blocks of --decode-cache all hold 9644 tokens: a smaller one, or more"
    assert told in capsys.readouterr().err


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
    got = compare.Measured(first_ms=[250.0], ttft_ms=[70.0, 74.0], between_ms=[7.0], told=told)
    got.gaps_ms = [[30.0, 4.0, 5.0, 6.0, 6.0, 6.5], [40.0, 4.0, 5.0, 6.0, 6.0, 60.5]]
    row = {"system": "blocks", "key": asdict(compare.Key("all", "young", 1, 16, "2:4")), "got": asdict(got)}
    before = {name: each for name, each in asdict(got).items() if name != "gaps_ms"} | {"second_ms": [9.0]}
    old = {**row, "system": "nixl", "got": before, "memory": {"prefill": 1024}}  # before processors and gaps were told
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
    sums, turns, gaps, parts, processes = [
        {row[0]: dict(zip(head, row, strict=True)) for row in rows} for head, *rows in tables_of(table)
    ]
    assert sums["blocks"]["hand-off ms"] == "42.0" and sums["blocks"]["TTFT ms"].startswith("72.0 (70-74)")
    assert parts["blocks"]["load"] == "25.0"
    times = {name: cell.split()[0] for name, cell in turns["blocks"].items()}
    assert times == {"system": "blocks", "turn 1": "250.0", "turn 2": "70.0", "turn 3": "74.0"}
    told = {"2nd": "35.0", "3rd": "4.0", "4th": "5.0", "later": "6.0", "longest later": "33.5"}
    assert {name: gaps["blocks"][name].split()[0] for name in told} == told
    assert gaps["nixl"]["2nd"].startswith("9.0") and gaps["nixl"]["later"] == "-"
    assert processes["blocks"] == {"system": "blocks", "prefill": "2.0 GiB, 1.50", "prefill daemon": "1.0 GiB, 0.25"}
    assert processes["nixl"]["prefill"] == "1.0 GiB"
    capsys.readouterr()


def tables_of(text: str) -> list[list[list[str]]]:
    """Each table's rows of cells; its head is the first."""
    tables: list[list[list[str]]] = []
    for line in text.splitlines():
        if line.startswith("┃"):
            tables.append([])
        if line.startswith(("┃", "│")):
            tables[-1].append([cell.strip() for cell in line[1:-1].split(line[0])])
    return tables


def test_a_turn_has_the_first_tokens_of_all_its_chats_in_every_round(compare: ModuleType) -> None:
    rounds = [[21.0, 22.0], [31.0, 32.0], [41.0, 42.0]]
    later = [ms + 100 * number for number in range(2) for turn in rounds for ms in turn]
    got = compare.Measured(first_ms=[11.0, 12.0, 111.0, 112.0], ttft_ms=later)
    assert [got.turn_ms(turn, 4, 2) for turn in range(4)] == [
        [10.0 * (turn + 1) + each for each in (1.0, 2.0, 101.0, 102.0)] for turn in range(4)
    ]


def test_of_a_population_so_many_are_asked_at_a_time(compare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, running, most = sys.modules["gpu_turns"], 0, 0

    async def ask(client: object, url: str, prompt: list[int], body: bytes) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return turns.Answer(float(len(prompt)), [1.0], [7, 8])

    monkeypatch.setattr(turns, "ask", ask)
    cluster = SimpleNamespace(engines={}, daemons=())
    shape = turns.Shape(first=10, more=5, turns=3, output=2)
    got = asyncio.run(turns.drive(cluster, "http://any", 2, shape, 1, count=5))
    assert most == 2 and got.first_ms == [10.0] * 5
    assert got.turn_ms(1, 3, 5) == [17.0] * 5 and got.turn_ms(2, 3, 5) == [24.0] * 5
    key = compare.Key("half", "young", 2, 2, population=5)
    assert key.chats == 5 and str(key) == "2 of 5 chats at a time, 2 tokens out, decode cache half, young"


def test_an_answer_has_a_gap_behind_each_token_but_the_last(compare: ModuleType) -> None:
    """Two tokens in one event are there at once."""

    async def reply(request: httpx.Request) -> httpx.Response:
        events = [{"choices": [{"token_ids": ids}]} for ids in ([7], [8, 9], [])]
        return httpx.Response(200, text="".join(f"data: {json.dumps(each)}\n\n" for each in events))

    async def asked() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
            return await sys.modules["gpu_turns"].ask(client, "http://any", [1], b"{}")

    answer = asyncio.run(asked())
    assert answer.ids == [7, 8, 9] and len(answer.gaps_ms) == 2 and answer.gaps_ms[1] == 0.0
    assert answer.between_ms == answer.gaps_ms[0] / 2


def test_a_table_has_what_the_chart_reads(compare: ModuleType) -> None:
    visits = [compare.gpu_tables.Visit(compare.Measured(first_ms=[9.0], ttft_ms=[5.0, 7.0]), 3, {}, {})]
    console = compare.Console(record=True, width=165, file=io.StringIO())
    for at_once in (1, 4):
        key = compare.Key("all", "young", at_once, 16)
        console.print(*compare.gpu_tables.tables(key, {"nixl": visits, "kvferry": visits}), sep="\n")
    found = charts.cases(console.export_text(), r"(\d+) at a time, .*, (young|wrapped): turns 2 and later", column=3)
    assert [(named, case.nixl, case.kvferry) for named, case in found] == [
        (("1", "young"), 6, 6),
        (("4", "young"), 6, 6),
    ]


def test_what_came_back_from_the_host_has_a_table_of_its_own(compare: ModuleType) -> None:
    told = {"kvferry restored bytes": [2.0**31, 2.0**31], "kvferry restore seconds": [0.5, 0.75]}
    told |= {"copied staged": [300.0], "copied batch": [100.0], "copied loop": [0.0]}
    console = compare.Console(record=True, width=165, file=io.StringIO())
    visits = [compare.gpu_tables.Visit(compare.Measured(first_ms=[9.0], ttft_ms=[5.0], told=told), 2, {}, {})]
    without = [compare.gpu_tables.Visit(compare.Measured(first_ms=[9.0], ttft_ms=[5.0]), 2, {}, {})]
    console.print(
        *compare.gpu_tables.tables(compare.Key("host", "young", 1, 16), {"nixl": without, "blocks": visits}), sep="\n"
    )
    assert [["system", "GiB", "seconds", "staged", "batch"], ["blocks", "4.0", "1.2", "75 %", "25 %"]] in tables_of(
        console.export_text()
    )


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
    ("system", "told", "ttft", "steps"),
    [
        ("alone", ONE_VLLM, 44.0, [4.0, 0.0, 0.0, 0.0, 0.0, 9.0, 1.0, 30.0]),
        ("nixl", {**ONE_VLLM, **PREFILL}, 75.0, [4.0, 3.0, 2.0, 26.0, 0.0, 9.0, 1.0, 30.0]),
        ("blocks", {**PREFILL, "load": 29.0, "D TTFT": 40.0, "D queue": 33.0, "D prefill": 2.0}, 44.0,
         [4.0, 0.0, 2.0, 26.0, 1.0, 5.0, 4.0, 2.0]),
        ("at-once", {**PREFILL, "load": 29.0, "D TTFT": 40.0, "D queue": 33.0, "D prefill": 0.0}, 35.0,
         [4.0, 3.0, 2.0, 26.0, 0.0, 0.0, 0.0, 0.0]),
    ],
    ids=["one vLLM", "legs in series", "legs at once", "prefill's token at once"],
)  # fmt: skip
def test_steps_to_a_first_token_follow_each_other(
    compare: ModuleType, system: str, told: dict[str, float], ttft: float, steps: list[float]
) -> None:
    found = compare.gpu_tables.steps_of(system, told, ttft)
    assert list(found.items()) == list(zip(compare.gpu_tables.STEPS, steps, strict=True))
    assert sum(found.values()) == ttft


def test_the_table_of_steps_has_what_the_timers_of_each_system_tell(compare: ModuleType) -> None:
    load = {"kvferry loads": [2.0, 2.0], "kvferry load seconds": [0.05, 0.07], "gather": [0.4, 0.6]}
    timers = {**PREFILL, "D TTFT": 40.0, "D queue": 33.0, "D prefill": 2.0}
    kvferry = {**load, **{name: [value, value] for name, value in timers.items()}}
    got = compare.Measured(first_ms=[90.0, 90.0], ttft_ms=[40.0, 44.0, 46.0, 50.0], told=kvferry)
    visits = {
        "alone": [
            compare.gpu_tables.Visit(compare.Measured(first_ms=[90.0], ttft_ms=[50.0]), 2, {}, {})
        ],  # of a run before they were kept
        "kvferry": [compare.gpu_tables.Visit(got, 3, {}, {})],
    }
    console = compare.Console(record=True, width=165, file=io.StringIO())
    console.print(*compare.gpu_tables.tables(compare.Key("all", "young", 1, 16), visits), sep="\n")
    found = [rows for rows in tables_of(console.export_text()) if "hand-off" in rows[0]]
    assert len(found) == 1
    head, alone, ours = found[0]
    assert set(alone[1:]) == {"-"}
    cells = dict(zip(head, ours, strict=True))
    assert (cells["hand-off"], cells["all"]) == ("2.0", "45.0")
    assert "P front end" not in cells, "no column of zeros"
