"""Adapters (LoRA) that are loaded anew under an old name: a pair through kvferry, token for token against one vLLM
without a connector that has each adapter under a name of its own.

The engines cache no prefixes, so that what is found of a prompt is what the daemons hold.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.bench.scripts import imported
from tests.connectors.vllm.test_version_pairs import OLDEST, newest, python_of

RANK, STRENGTH = 8, 0.15  # of the adapters; so strong that replies differ
TOKENS = 12  # of each reply
NAME = "adapter"  # that all have in the pair
SIDES = ("prefill", "decode")


class Step(NamedTuple):
    told: str
    contents: str  # "": no adapter
    path: str = ""  # that is loaded before; "": nothing is
    in_place: bool = False
    finds: bool = False  # what the decode daemon holds of these contents is found; else nothing is found


STEPS = (
    Step("an adapter", "a", "first"),
    Step("the same again", "a", finds=True),
    Step("other contents under its name", "b", "second"),
    Step("the first contents again, from another folder", "a", "third", finds=True),
    Step("others in place", "b", "fourth", in_place=True),
    Step("others in place, in the same files", "a", "fourth", in_place=True),
    Step("the model without an adapter", ""),
)


def write_adapter(bench: SimpleNamespace, folder: Path, seed: str) -> None:
    """A random one, for queries and values."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((bench.cluster.model_folder() / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    rows = {"q_proj": heads * size, "v_proj": config["num_key_value_heads"] * size}
    chosen = torch.Generator().manual_seed(ord(seed))
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for part, out in rows.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=chosen) * STRENGTH
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, RANK, generator=chosen) * STRENGTH
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    told |= {"target_modules": list(rows)}
    (folder / "adapter_config.json").write_text(json.dumps(told))


async def load(bench: SimpleNamespace, url: str, step: Step, path: Path) -> None:
    """RuntimeError where vLLM refuses it."""
    async with bench.chat.new_client() as client:
        if not step.in_place:
            await client.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": NAME})  # 404 where there is none
        asked = {"lora_name": NAME, "lora_path": str(path), "load_inplace": step.in_place}
        answer = await client.post(f"{url}/v1/load_lora_adapter", json=asked)
    if answer.status_code != 200:
        raise RuntimeError(f"{url} loads no adapter: {answer.status_code} {answer.text[:300]}")


async def replies_of(bench: SimpleNamespace, url: str, model: str, asked: list[Any]) -> list[Any]:
    """One after the other."""
    async with bench.chat.new_client() as client:

        async def one(messages: Any) -> Any:
            body = {**bench.chat.body(messages, TOKENS), "model": model or bench.chat.MODEL_NAME}
            return await bench.chat.streamed(client, url, body, time.monotonic())

        return [await one(messages) for messages in asked]


def references(bench: SimpleNamespace, spec: Any, folder: Path, asked: list[Any]) -> dict[str, list[Any]]:
    adapters = [f"{name}={folder / name}" for name in "ab"]
    flags = (*spec.flags, "--max-loras", "2", "--lora-modules", *adapters)
    with bench.cluster.Cluster(replace(spec, flags=flags)) as cluster:
        url = cluster.alone().url
        return {name: asyncio.run(replies_of(bench, url, name, asked)) for name in ("a", "b", "")}


def run_step(
    bench: SimpleNamespace, cluster: Any, step: Step, folder: Path, asked: list[Any], want: list[Any]
) -> tuple[str, list[str]]:
    """What happened, and what of it is wrong."""
    if step.path:
        write_adapter(bench, folder / step.path, step.contents)
        for side in SIDES:
            asyncio.run(load(bench, cluster.engines[side].url, step, folder / step.path))
    before = bench.compare.done_by(cluster, "kvferry")
    got = asyncio.run(replies_of(bench, cluster.front, NAME if step.contents else "", asked))
    wrong: list[str] = bench.chaos.leaks(cluster)
    done = bench.compare.done_by(cluster, "kvferry").less(before)
    comparison = bench.chat.Comparison()
    for number, (reference, reply) in enumerate(zip(want, got, strict=True)):
        comparison.add(f"prompt {number}", reference, reply)
    if bool(done.hit_tokens) is not step.finds:
        wrong.append(f"{'none' if step.finds else 'some'} were held")
    if bool(done.delta_pages) is step.in_place:
        wrong.append(f"{'some' if step.in_place else 'no'} pages came")
    told = f"{step.told}: {comparison}; decode received {done.delta_pages} pages, its daemon held {done.hit_tokens}"
    return f"{told} tokens", wrong + comparison.wrong


@pytest.fixture
def bench() -> Iterator[SimpleNamespace]:
    with imported("vllm", ("chat", "cluster", "compare", "chaos")) as modules:
        yield modules


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", [lambda: OLDEST, newest], ids=["oldest", "newest"])
def test_what_one_adapter_computed_is_never_found_for_another_of_its_name(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: Callable[[], str]
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    python = python_of(which())
    flags = (*bench.cluster.SMALL, "--no-enable-prefix-caching", "--enable-lora", "--max-lora-rank", str(RANK))
    spec = bench.cluster.Spec(flags=flags, python=python, decode_python=python, extra={"deadline_seconds": 60.0})
    asked = bench.chaos.prompts(3, 1)  # with no page in common
    for each in "ab":
        write_adapter(bench, tmp_path / each, each)
    want = references(bench, spec, tmp_path, asked)
    firsts = {tuple(token.text for token in replies[0].tokens) for replies in want.values()}
    assert len(firsts) == len(want), "the adapters do not change the replies, so that nothing is shown"
    with bench.cluster.Cluster(spec) as cluster:
        cluster.kvferry()
        wrong = []
        for step in STEPS:
            told, bad = run_step(bench, cluster, step, tmp_path, asked, want[step.contents])
            print(told, *bad, sep="\n  ")
            wrong += bad
    assert not wrong
