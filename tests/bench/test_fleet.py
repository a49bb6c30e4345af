"""The fleet of bench/vllm: its load, what it refuses, and the table that it makes; no server runs here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from tests.bench.scripts import imported

MODULES = ("fleet", "cluster", "gpu_compare", "gpu_turns", "chat", "engine_threads", "versions")


@pytest.fixture(scope="module")
def fleet() -> Iterator[ModuleType]:
    with imported("vllm", MODULES) as modules:
        yield modules.fleet


def test_each_system_gets_the_same_prompts(fleet: ModuleType) -> None:
    load = fleet.Load(prefixes=3, prefix=50, own=7, output=5, at_once=4, requests=40)
    prompts = list(load.prompts())
    assert prompts == list(load.prompts()) and len(prompts) == 40
    assert {len(prompt) for prompt in prompts} == {57}
    assert len({tuple(prompt[:50]) for prompt in prompts}) == 3
    assert len({tuple(prompt[50:]) for prompt in prompts}) == 40


def test_chats_grow_and_decode_engines_share_them(fleet: ModuleType) -> None:
    load = fleet.Load(prefixes=3, prefix=50, own=7, output=5, at_once=5, requests=40, turns=4, decodes=2)
    assert load.longest == 50 + 4 * 12
    assert load.shared_tokens == 3 * 50 + 3 * (4 * 12 + 64)


@pytest.mark.parametrize(("tokens", "fits"), [(150 + 4 * (7 + 5 + 64), True), (150 + 4 * (7 + 5 + 64) - 1, False)])
def test_what_decode_cannot_hold_is_refused(
    fleet: ModuleType,
    tokens: int,
    fits: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        fleet, "measured", lambda system, args, console: {"system": system, "got": asdict(fleet.Measured())}
    )
    words = ["run", "--output", str(tmp_path / "rows.json"), "--prefixes", "3", "--prefix", "50", "--own", "7"]
    words += ["--output-tokens", "5", "--at-once", "4", "--decode-tokens", str(tokens), "--systems", "nixl"]
    monkeypatch.setattr(sys, "argv", ["fleet.py", *words])
    assert fleet.main() == (0 if fits else 2)
    assert ("fewer --prefixes or --at-once" in capsys.readouterr().out) is not fits
    assert (tmp_path / "rows.json").exists() is fits


def test_rates_are_of_the_whole_and_of_warm_caches(fleet: ModuleType) -> None:
    begun = [float(i) for i in range(11)]  # a second apart, each for two seconds
    got = fleet.Measured(seconds=12.0, begun=begun, ended=[each + 2 for each in begun], ttft_ms=[1.0] * 11)
    assert fleet.per_second(got) == pytest.approx(11 / 12)
    assert fleet.warm_per_second(got) == pytest.approx(1.0)


def test_the_table_has_a_row_a_system_and_their_ratios(
    fleet: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"machine": "m", "prefills": 3, "requests": 4, "at_once": 2, "prefixes": 1, "prefix": 50, "own": 7}
    shape |= {"output_tokens": 5, "decode_tokens": 999, "prefill_tokens": 999}
    rows = []
    for system, seconds, ms in (("kvferry", 10.0, 100.0), ("nixl-cold", 20.0, 900.0)):
        told = {"prompt": 400.0, "computed": 100.0, "P e2e": 80.0}
        got = fleet.Measured(seconds, [], [0, 1, 2, 3], [2, 3, 4, 5], [ms] * 4, [3.0] * 4, told)
        rows.append(json.dumps({"system": system, "got": asdict(got), "shape": shape}))
    (tmp_path / "rows.json").write_text("\n".join(rows))
    sys_argv, sys.argv = sys.argv, ["fleet.py", "table", str(tmp_path / "rows.json"), "--output", str(tmp_path / "t")]
    try:
        assert fleet.main() == 0
    finally:
        sys.argv = sys_argv
    told_text = capsys.readouterr().out
    assert "kvferry to nixl-cold: 2.00 x requests/s, TTFT p50 9.0 x lower" in told_text
    assert told_text.index("nixl-cold │") < told_text.index("kvferry   │")
    assert "100 of 400" in told_text and (tmp_path / "t").read_text() in told_text
