"""Prompts of one text with unlike images, salts or embeddings: a pair through kvferry, token for token against one vLLM
without a connector. What one of them computed is found for itself alone, by the engines and by the daemons."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import time
from collections.abc import Callable, Iterator
from operator import sub
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest

from bench.small_models import model_of_images
from tests.bench.scripts import imported
from tests.connectors.vllm.test_version_pairs import OLDEST, newest, python_of

TOKENS = 12  # of each reply
SIDES = ("prefill", "decode")


class Step(NamedTuple):
    image: str = ""  # "": none
    salt: str = ""
    embeds: str = ""  # in the place of all text
    emptied: bool = False  # the engines' own caches are, before
    found_by: str = ""  # "": by nobody


STEPS = (
    Step("a"),
    Step("a", found_by="engines and daemons"),
    Step("a", emptied=True, found_by="daemons"),
    Step("b"),
    Step("b", emptied=True, found_by="daemons"),
    Step("b", salt="x"),
    Step(salt="x"),
    Step(salt="y"),
    Step(salt="x", emptied=True, found_by="daemons"),
    Step(),
)
OF_EMBEDDINGS = (
    Step(embeds="a"),
    Step(embeds="a", found_by="engines and daemons"),
    Step(embeds="a", emptied=True, found_by="daemons"),
    Step(embeds="b"),
    Step(embeds="b", emptied=True, found_by="daemons"),
    Step(),
)


def picture(seed: str) -> str:
    """Noise, as a URL."""
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (56, 56), random.Random(seed).randbytes(3 * 56 * 56)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def embeddings(bench: SimpleNamespace, seed: str) -> str:
    """Of some tokens, whichever they are."""
    import torch

    hidden = json.loads((bench.cluster.model_folder() / "config.json").read_text())["hidden_size"]
    rows = torch.randn((150, hidden), generator=torch.Generator().manual_seed(ord(seed))) * 0.1
    torch.save(rows, file := io.BytesIO())
    return base64.b64encode(file.getvalue()).decode()


def body_of(bench: SimpleNamespace, step: Step) -> dict[str, object]:
    """The image is within the first page, so that no other image's page is before it."""
    content: list[dict[str, Any]] = [{"type": "text", "text": bench.chat.user_text(0, 0, 70)}]
    if step.image:
        content.insert(0, {"type": "image_url", "image_url": {"url": picture(step.image)}})
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]
    return {**bench.chat.body(messages, TOKENS), **({"cache_salt": step.salt} if step.salt else {})}


def reply_of(bench: SimpleNamespace, url: str, step: Step) -> Any:
    async def ask() -> Any:
        async with bench.chat.new_client() as client:
            return await bench.chat.streamed(client, url, body_of(bench, step), time.monotonic())

    return reply_to_embeddings(bench, url, step.embeds) if step.embeds else asyncio.run(ask())


def reply_to_embeddings(bench: SimpleNamespace, url: str, seed: str) -> Any:
    asked = {"model": bench.chat.MODEL_NAME, "prompt_embeds": embeddings(bench, seed), "max_tokens": TOKENS}
    asked |= {"temperature": 0, "ignore_eos": True, "logprobs": 2}
    answer = httpx.post(url + "/v1/completions", json=asked, trust_env=False, timeout=300.0)
    assert answer.status_code == 200, answer.text
    told = answer.json()["choices"][0]["logprobs"]
    reply = bench.chat.Reply(prompt_tokens=answer.json()["usage"]["prompt_tokens"])
    for text, logprob, best in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        others = [each for name, each in best.items() if name != text]
        reply.tokens.append(bench.chat.Token(text, logprob, max(others, default=-1e9)))
    return reply


def run_step(bench: SimpleNamespace, cluster: Any, step: Step, want: Any) -> tuple[str, list[str]]:
    """What happened, and what of it is wrong."""
    for side in SIDES if step.emptied else ():
        answer = httpx.post(cluster.engines[side].url + "/reset_prefix_cache", trust_env=False, timeout=60.0)
        assert answer.json() == {"success": True}
    before = bench.resets.counts(cluster)
    got = reply_of(bench, cluster.front, step)
    wrong: list[str] = bench.chaos.leaks(cluster)
    done = bench.resets.Counts(*map(sub, bench.resets.counts(cluster), before))
    comparison = bench.chat.Comparison()
    comparison.add(str(step), want, got)
    found = {"engines": done.own, "daemons": done.held + done.prefill_held}
    for name, tokens in found.items():
        if bool(tokens) is not (name in step.found_by):
            wrong.append(f"the {name} found {tokens} tokens")
    if done.failed:
        wrong.append(f"{done.failed} loads or pushes failed")
    return f"{step}: {comparison}; {done}", wrong + comparison.wrong


@pytest.fixture
def bench() -> Iterator[SimpleNamespace]:
    with imported("vllm", ("chat", "cluster", "compare", "chaos", "versions", "resets")) as modules:
        yield modules


def run_steps(bench: SimpleNamespace, python: Path, flags: tuple[str, ...], steps: tuple[Step, ...]) -> list[str]:
    """What is wrong."""
    all_flags = (*bench.cluster.SMALL, *flags)
    patient = {"deadline_seconds": 120.0, "lookup_seconds": 15.0}
    spec = bench.cluster.Spec(python=python, decode_python=python, flags=all_flags, extra=patient)
    with bench.cluster.Cluster(spec) as cluster:
        url = cluster.alone().url
        want = {key: reply_of(bench, url, step) for step in steps for key in [(step.image, step.embeds)]}
    said = {tuple(token.text for token in reply.tokens) for reply in want.values()}
    assert len(said) == len(want), "the replies are the same, so that nothing is shown"
    wrong = []
    with bench.cluster.Cluster(spec) as cluster:
        cluster.kvferry()
        for step in steps:
            told, bad = run_step(bench, cluster, step, want[step.image, step.embeds])
            print(told, *bad, sep="\n  ", flush=True)
            wrong += bad
    return wrong


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", [lambda: OLDEST, newest], ids=["oldest", "newest"])
def test_images_and_salts_of_one_text_have_no_page_in_common(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, which: Callable[[], str]
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_MODEL", str(model_of_images()))
    assert not run_steps(bench, python_of(which()), (), STEPS)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", [lambda: OLDEST, newest], ids=["oldest", "newest"])
def test_embeddings_in_the_place_of_text_have_no_page_in_common(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, which: Callable[[], str]
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert not run_steps(bench, python_of(which()), ("--enable-prompt-embeds",), OF_EMBEDDINGS)
