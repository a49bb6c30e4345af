"""A pair of two ranks a side with an EAGLE3 head, which writes into its configuration where it is made: in the workers'
processes, not in the scheduler's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.workers.smollm import converted_model
from tests.bench.scripts import BENCH, imported
from tests.connectors.vllm.test_version_pairs import OLDEST, newest, python_of

RANKS = 2
UNCACHED = ("--no-enable-prefix-caching",)  # so that what decode has of a turn before, its daemon has


@pytest.fixture
def bench() -> Iterator[SimpleNamespace]:
    with imported("vllm", ("chat", "cluster", "greedy")) as modules:
        yield modules


def write_models(folder: Path) -> dict[str, object]:
    """Writes a model of one layer and its head beside it: what vLLM is told of the head."""
    words = [sys.executable, str(BENCH / "gpu" / "models.py"), "eagle3", str(converted_model()), str(folder)]
    subprocess.run(words, check=True)
    return {"method": "eagle3", "model": f"{folder}-draft", "num_speculative_tokens": 3}


def drafted(cluster: Any, engine: str) -> tuple[int, int]:
    """Tokens of the draft model that the engine has taken, and those that were proposed to it."""
    taken, proposed = (
        int(cluster.metric(engine, f"vllm:spec_decode_num_{kind}_tokens_total")) for kind in ("accepted", "draft")
    )
    return taken, proposed


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("which", [lambda: OLDEST, newest], ids=["oldest", "newest"])
def test_a_pair_of_ranks_with_an_eagle3_head_answers_as_one_vllm_and_finds_what_it_keeps(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: Callable[[], str]
) -> None:
    draft = write_models(tmp_path / "model")
    monkeypatch.setenv("VLLM_MODEL", str(tmp_path / "model"))
    python, load = python_of(which()), bench.chat.Load(conversations=2, turns=2, user_words=60, max_tokens=16)
    spec = bench.cluster.Spec(
        flags=(*bench.cluster.SMALL, "--speculative-config", json.dumps(draft)), decode_flags=UNCACHED,
        ranks=dict.fromkeys(bench.cluster.ENGINES, RANKS), python=python, decode_python=python,
        extra={"deadline_seconds": 120.0},
    )  # fmt: skip
    with bench.cluster.Cluster(spec) as cluster:
        reference = bench.greedy.refer(cluster.alone().url, load)
        alone = drafted(cluster, "alone")
    texts = bench.chat.texts(reference.replies)
    with bench.cluster.Cluster(spec) as cluster:
        cluster.kvferry()
        held = [0]
        # Behind the front end decode's daemon is asked by the workers; of a prompt without a prefill half its engine's
        # scheduler says what is there.
        for url in (cluster.front, cluster.engines["decode"].url):
            replies = asyncio.run(bench.chat.run_chats(url, load, texts))
            comparison = bench.chat.compared(reference.replies, replies, reference.again)
            held.append(cluster.stats("decode").requests.hit_tokens)
            print(f"{url}: {comparison}; the daemon held {held[-1] - held[-2]} tokens", *comparison.told)
            assert not comparison.wrong
        (taken, proposed), (wanted, needed) = drafted(cluster, "decode"), alone
    print(f"accepted {taken} of {proposed} draft tokens; one vLLM, asked twice as well: {wanted} of {needed}")
    # In float32 exactly; how many are proposed depends on what of a reply's last steps is under way when it ends.
    assert taken == wanted > 0
    assert 0 < held[1] < held[2]
