"""What the benchmarks of many ranks decide before a server runs: GPUs of ranks, layers that fit, calls of a machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.rank_lanes import lanes_of
from tests.bench.scripts import BENCH, imported

GPUS = [f"cuda:{number}" for number in range(4)]
HEADS = KVGeometry(2, 8, 4, "float32", 16)


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with imported("", ("rank_devices", "model_shapes")) as modules:
        yield modules


@pytest.mark.parametrize(("sending", "receiving"), [(2, 2), (1, 2), (2, 1), (1, 3), (1, 1)])
def test_ranks_have_gpus_of_their_own_where_there_are_enough(
    scripts: SimpleNamespace, sending: int, receiving: int
) -> None:
    prefill, decode = scripts.rank_devices.devices_of(GPUS, sending, receiving)
    assert (prefill, decode) == (GPUS[:sending], GPUS[-receiving:])


@pytest.mark.parametrize(("gpus", "sending", "receiving"), [(4, 4, 4), (4, 2, 4), (4, 4, 2), (2, 2, 2)])
def test_ranks_that_share_gpus_and_heads_are_on_two_of_them(
    scripts: SimpleNamespace, gpus: int, sending: int, receiving: int
) -> None:
    prefill, decode = scripts.rank_devices.devices_of(GPUS[:gpus], sending, receiving)
    assert len(set(prefill)) == sending and len(set(decode)) == receiving
    lanes = lanes_of(HEADS, sending, receiving)
    assert all(prefill[lane.sender] != decode[lane.receiver] for lane in lanes)
    assert sorted(scripts.rank_devices.pairs_of(sending, receiving)) == sorted(
        (lane.sender, lane.receiver) for lane in lanes
    )


def test_more_ranks_than_gpus_are_refused(scripts: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="decode has 4 ranks; there are 2 devices: cuda:0, cuda:1"):
        scripts.rank_devices.devices_of(GPUS[:2], 2, 4)


def test_a_token_and_the_weights_have_the_bytes_of_the_model(scripts: SimpleNamespace) -> None:
    qwen = scripts.model_shapes.SHAPES["qwen3-32b"]
    assert qwen.kv_bytes(64) == 262_144
    assert qwen.weight_bytes(64) == pytest.approx(2 * 32.76e9, rel=1e-3)


def write_base(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4096, "rms_norm_eps": 1e-5}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<unk>": 0, "<eos>": 1}}}))


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        (["--pairs", "4:4", "2:4", "--gpus", "4"], 64),
        (["--pairs", "2:2", "--gpus", "2", "--gpu-gib", "79"], 58),
        (["--pairs", "2:2", "--gpus", "2", "--layers", "7"], 7),
    ],
)
def test_a_folder_has_as_many_layers_as_fit(
    scripts: SimpleNamespace, words: list[str], layers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write_base(tmp_path / "base")
    monkeypatch.setattr(sys, "argv", ["-", "qwen3-32b", str(tmp_path / "base"), str(tmp_path / "q"), *words])
    assert scripts.model_shapes.main() == 0
    made = Path(capsys.readouterr().out.strip())
    config = json.loads((made / "config.json").read_text())
    assert made.name == f"q-{layers}" and config["num_hidden_layers"] == layers
    assert (config["architectures"], config["rms_norm_eps"]) == (["Qwen3ForCausalLM"], 1e-5)
    words_there = json.loads((made / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(words_there.values()) == list(range(config["vocab_size"]))


def plan(gpus: int, *steps: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PLAN": "1", "PYTHON": "python", "GPUS": str(gpus), **settings}
    command = ["bash", str(BENCH / "gpu_host.sh"), "out", *steps]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_machine_runs_what_it_has_gpus_for() -> None:
    four, two = plan(4), plan(2)
    assert four.returncode == two.returncode == 0
    for steps, told in (("lanes 4:4 2:4 4:2 1:1 fleet half", four), ("lanes 2:2 1:2 2:1 1:1 fleet", two)):
        assert [line[3:] for line in told.stdout.splitlines() if line.startswith("== ")] == steps.split()
    assert "DECODES=2" in four.stdout and "--at-once 64" in four.stdout and "--at-once 32" in four.stdout
    (call,) = [line for line in plan(4, "4:2", LAYERS="8").stdout.splitlines() if not line.startswith("==")]
    for word in ("LAYERS=8", "SHAPE=qwen3-32b", "bench/gpu/ranks.sh out 4:2"):
        assert word in call


@pytest.mark.parametrize(
    ("gpus", "steps", "says"),
    [(3, (), "there are 3 GPUs; it must be 2, 4 or 8"), (4, ("5",), "5 is no step"), (2, ("half",), "half of 2 GPUs")],
)
def test_what_a_machine_cannot_run_is_refused(gpus: int, steps: tuple[str, ...], says: str) -> None:
    told = plan(gpus, *steps)
    assert (told.returncode, told.stdout) == (2, "") and says in told.stderr
