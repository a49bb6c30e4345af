"""Real models: steps that fail, the facts of a saved model, and how its weights are found and loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils.logging import enable_progress_bar

from kvferry.client.rank_pools import RankPools
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.workers.models import transformer as model_module
from kvferry.workers.models.interface import Prompt, Step
from kvferry.workers.models.sampling import Sampling
from kvferry.workers.models.transformer import KVShape, folder_fingerprint, load_model, loaded, weights_revision
from kvferry.workers.smollm import cache_folder
from tests.support.tiny_models import VOCABULARY, random_model


@pytest.mark.parametrize("call", ["prompt", "step", "two steps", "token"])
def test_what_a_failed_step_has_begun_is_over_before_the_request_is_given_up(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The daemon gives its pages to others then, and a GPU may still write them."""
    network = random_model("qwen2")
    model = loaded(network, "fingerprint", "revision")
    geometry = KVGeometry(layers=3, kv_heads=2, head_dim=8, dtype="float32", page_size=16)
    pool = np.zeros((4, geometry.page_bytes), np.uint8)
    compute = model.compute(RankPools.single(pool, geometry))
    prompt = Prompt(np.arange(20, dtype=np.uint32), bytes(32), bytes(32))
    sequences = [compute.sequence(prompt, pages, Sampling(), shared_tokens=0) for pages in ([0, 1], [2, 3])]
    for sequence in sequences:
        sequence.resume(0)
        sequence.prompt(0, 20)
    calls: list[str] = []

    def fail(*words: object, **named: object) -> None:
        calls.append("failed")
        raise RuntimeError("out of memory")

    if call == "token":
        monkeypatch.setattr(model_module, "sample", fail)
    else:
        monkeypatch.setattr(network, "forward", fail)
    monkeypatch.setattr(model_module, "settle", lambda ranks: calls.append("settled"))
    steps = [Step(sequence, 1, 20) for sequence in sequences]
    fresh = compute.sequence(prompt, [0, 1], Sampling(), shared_tokens=0)
    begin = {
        "prompt": lambda: fresh.prompt(0, 20),
        "step": lambda: compute.steps(steps[:1]),
        "token": lambda: compute.steps(steps[:1]),
        "two steps": lambda: compute.steps(steps),
    }
    with pytest.raises(RuntimeError, match="out of memory"):
        begin[call]()
    assert calls == ["failed", "settled"]


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mixtral"])
def test_facts_of_a_saved_model(tmp_path: Path, family: str) -> None:
    random_model(family).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32", threads=1)
    heads = 4 if family == "gpt2" else 2
    assert model.shape == KVShape(3, heads, 8, "float32")
    assert (model.vocabulary, model.max_tokens) == (VOCABULARY, 256)
    assert model.geometry.page_size == 0
    assert model.fingerprint.startswith(f"{family}-")
    assert load_model(tmp_path, dtype="bfloat16", threads=1).shape.dtype == "bfloat16"


def test_no_bar_where_stderr_is_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    random_model("gpt2").save_pretrained(tmp_path)
    enable_progress_bar()
    capfd.readouterr()
    load_model(tmp_path, dtype="float32", threads=1)
    assert "Loading" not in capfd.readouterr().err


def test_other_weights_of_the_same_size_are_another_revision(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    model = random_model("gpt2")
    model.save_pretrained(first)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    model.save_pretrained(second)
    assert [path.stat().st_size for path in first.glob("*.safetensors")] == [
        path.stat().st_size for path in second.glob("*.safetensors")
    ]
    assert folder_fingerprint(first) == folder_fingerprint(second)
    assert weights_revision(first) != weights_revision(second)
    third = tmp_path / "c"
    shutil.copytree(first, third)
    assert weights_revision(first) == weights_revision(third)


def test_another_configuration_is_another_model(tmp_path: Path) -> None:
    random_model("qwen2").save_pretrained(tmp_path)
    before = folder_fingerprint(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "transformers_version": "0"}))
    assert folder_fingerprint(tmp_path) == before
    path.write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert folder_fingerprint(tmp_path) != before


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no weight files"):
        weights_revision(tmp_path)


def test_weights_that_are_a_pickle_are_not_loaded(tmp_path: Path) -> None:
    model = random_model("qwen2")
    model.save_pretrained(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_model(tmp_path, dtype="float32", threads=1)
    with pytest.raises(ValueError, match="has no weight files"):
        weights_revision(tmp_path)


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/kvferry")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "kvferry"
