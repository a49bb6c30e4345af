"""What names a request's pages: vLLM's keys, each with its kind. `chains.py` compares with an installed vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.prompt_chain import PromptChain, Unnamed
from kvferry.connectors.vllm import extra_keys
from kvferry.connectors.vllm.extra_keys import keys_of
from tests.connectors.vllm.chains import BLOCK, Request


def test_a_request_that_its_tokens_name_is_not_looked_at() -> None:
    assert keys_of(Request([1, 2, 3])) is None
    assert keys_of(Request([1, 2, 3], cache_salt="")) is None


Vllm = Callable[[list[Any]], None]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    """Has vLLM answer with these keys."""
    answer: list[Any] = []
    module = ModuleType("vllm.v1.core.kv_cache_utils")
    module.generate_block_hash_extra_keys = lambda *_: (tuple(answer) or None, 0)  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def answers(keys: list[Any]) -> None:
        answer[:] = keys

    return answers


def adapter(folder: Path, name: str = "x", number: int = 1, weights: bytes = b"1", scale: int = 8) -> SimpleNamespace:
    """One that is loaded as `number`."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(f'{{"lora_alpha": {scale}}}')
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder), load_inplace=False)


def first_keys(request: Request) -> Any:
    keys = keys_of(request)
    assert keys is not None
    return keys(0, BLOCK)


@pytest.mark.parametrize("tagged", [False, True], ids=["0.26", "0.32"])
def test_every_key_has_its_kind_in_all_versions(vllm: Vllm, tagged: bool) -> None:
    kinds = (("mm", "ab", -3), ("cache_salt", "s"), ("prompt_embeds", b"e"))
    vllm([*kinds] if tagged else [("ab", -3), "s", b"e"])
    assert first_keys(Request([1], cache_salt="s")) == kinds
    vllm([])
    assert first_keys(Request([1], cache_salt="s")) is None, "behind the first page"


@pytest.mark.parametrize("own", ["x", ("lora", "x", "/path")], ids=["0.26", "0.32"])
def test_an_adapter_is_not_a_salt_of_its_name(vllm: Vllm, tmp_path: Path, own: Any) -> None:
    tokens = list(range(BLOCK))
    vllm(["x"])
    salted = PromptChain(source := Request(tokens, cache_salt="x"), BLOCK, keys_of(source)).pages(BLOCK)
    vllm([own])
    source = Request(tokens, lora_request=adapter(tmp_path / "a", number=70))
    assert salted != PromptChain(source, BLOCK, keys_of(source)).pages(BLOCK)


def test_an_adapter_that_is_loaded_anew_is_named_by_what_it_has_then(vllm: Vllm, tmp_path: Path) -> None:
    vllm(["x"])
    folder = tmp_path / "a"

    def key(number: int, **changed: Any) -> Any:
        return first_keys(Request([1], lora_request=adapter(folder, number=number, **changed)))

    first = key(1)
    assert key(2) == first and first[0][:2] == ("lora", "x")
    weights = {"weights": b"2"}
    second = key(3, **weights)
    third = key(4, **weights, scale=16)
    assert len({first, second, third}) == 3
    other = first_keys(Request([1], lora_request=adapter(tmp_path / "b", number=5, weights=b"2")))
    assert other == second, "on the other side it may lie elsewhere"


def test_an_adapter_whose_files_change_has_no_name_from_then_on(vllm: Vllm, tmp_path: Path) -> None:
    vllm(["x"])
    loaded = adapter(tmp_path / "a", number=80)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    assert first_keys(Request([1], lora_request=loaded)) == first_keys(Request([2], lora_request=loaded))
    weights.write_bytes(b"2")
    for _ in range(2):
        with pytest.raises(Unnamed, match=r"files of its adapter, '.*/a', have changed"):
            first_keys(Request([1], lora_request=loaded))
    weights.unlink()
    with pytest.raises(Unnamed, match=r"have changed|is gone"):
        first_keys(Request([1], lora_request=loaded))


def test_a_request_keeps_the_name_of_its_adapter(vllm: Vllm, tmp_path: Path) -> None:
    vllm(["x"])
    loaded = adapter(tmp_path / "a", number=81)
    keys = keys_of(Request([1], lora_request=loaded))
    assert keys is not None
    first = keys(0, BLOCK)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    assert keys(BLOCK, 2 * BLOCK) == first, "it may run on for long"
    with pytest.raises(Unnamed):
        first_keys(Request([1], lora_request=loaded))


def test_another_adapter_of_a_number_has_a_name_of_its_own(vllm: Vllm, tmp_path: Path) -> None:
    vllm(["x"])
    one, other = (adapter(tmp_path / name, number=82, weights=name.encode()) for name in "ab")
    assert first_keys(Request([1], lora_request=one)) != first_keys(Request([1], lora_request=other))


def test_names_of_more_adapters_than_are_kept_are_made_again(vllm: Vllm, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(extra_keys, "ADAPTERS", 2)
    adapters, hashed = extra_keys.Adapters(), []
    monkeypatch.setattr(extra_keys, "hash_of", lambda files: hashed.append(files) or "name")
    paths = {number: adapter(tmp_path / str(number)).lora_path for number in (1, 2, 3)}
    for number in (1, 2, 1, 3, 1, 2):
        adapters.revision(number, paths[number])
    assert len(hashed) == 4


def test_what_names_no_adapter_is_said(vllm: Vllm, tmp_path: Path) -> None:
    vllm(["x"])
    loaded = adapter(tmp_path / "a", number=71)
    loaded.load_inplace = True
    with pytest.raises(Unnamed, match="adapter 'x' is loaded in place"):
        first_keys(Request([1], lora_request=loaded))
    (empty := tmp_path / "empty").mkdir()
    for path in (empty, tmp_path / "nowhere"):
        gone = SimpleNamespace(lora_name="x", lora_int_id=72, lora_path=str(path), load_inplace=False)
        with pytest.raises(Unnamed, match=f"no files of its adapter, '{path}'"):
            first_keys(Request([1], lora_request=gone))
