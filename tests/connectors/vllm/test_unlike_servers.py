"""Two servers of a pair whose own prefix caches hash otherwise, or in blocks of another size, name pages alike."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from kvferry.connectors.orders import Begin, Load
from kvferry.connectors.scheduler_decode import DecodeScheduler
from kvferry.connectors.scheduler_prefill import PrefillScheduler
from kvferry.connectors.scheduler_side import Shape
from kvferry.connectors.settings import Settings
from kvferry.connectors.vllm.facts import facts_of
from kvferry.connectors.weights_epoch import WeightsEpoch
from kvferry.radix.digests import split_digests
from kvferry.transfer.geometry.namespace import NamespaceFacts
from tests.connectors.scheduling import TO_DECODE, TO_PREFILL, Daemon, Request, keys_of, orders
from tests.connectors.vllm.test_caches import FullAttentionSpec, engine, kv

ROOT = Path(__file__).resolve().parents[3]
PAGE = 64
PROMPT = 3 * PAGE + 5
NAMES = """
from kvferry.connectors.prompt_chain import PromptChain
from tests.connectors.scheduling import Request, keys_of
for request in (Request("a", 70), Request("b", 70, adapter="x")):
    print(PromptChain(request, 32, keys_of(request)).prompt(70))
"""


def facts(algorithm: str, block_tokens: int, *, caching: bool = True) -> NamespaceFacts:
    config = engine(prefix_caching_hash_algo=algorithm, enable_prefix_caching=caching, block_size=block_tokens)
    config.model_config.get_total_num_kv_heads = lambda: 2
    shape = Shape(block_tokens, PAGE // block_tokens)
    return facts_of(config, kv(FullAttentionSpec(block_size=block_tokens)), shape, Settings("/s", revision="1"))


def test_their_pages_are_of_one_namespace() -> None:
    """On GPUs. How blocks of two sizes make one page: test_facts.py."""
    ours = facts("sha256", 16)
    for theirs in (facts("sha256_cbor", 32), facts("xxhash", 64), facts("xxhash_cbor", 16, caching=False)):
        assert theirs == ours and theirs.id == ours.id
    assert replace(ours, digest_algorithm="sha256").id != ours.id


def test_both_halves_of_a_request_have_the_same_names_in_blocks_of_any_size() -> None:
    for adapter in ("", "x"):
        told = []
        for block_tokens in (16, 32, 64):
            shape, epoch = Shape(block_tokens, PAGE // block_tokens), WeightsEpoch(str)
            to = PrefillScheduler(shape, Daemon(), keys_of=keys_of, epoch=epoch)
            at = DecodeScheduler(shape, Daemon(), keys_of=keys_of, epoch=epoch)
            blocks = list(range(-(-PROMPT // block_tokens)))
            sent, got = (Request("a", PROMPT, params, adapter=adapter) for params in (TO_PREFILL, TO_DECODE))
            to.new_request(sent)
            to.matched(sent, 0)
            to.allocated(sent, blocks, 0)
            at.new_request(got)
            assert at.matched(got, 0) == (PROMPT, True)
            at.allocated(got, blocks, PROMPT)
            (begin,), (load,) = orders(to), orders(at)
            assert isinstance(begin, Begin) and isinstance(load, Load)
            told += [begin.prompt, load.prompt]
        assert len(split_digests(told[0].digests)) == 3 and all(prompt == told[0] for prompt in told)


def test_names_are_the_same_whatever_python_seeds_its_own_hashes_with() -> None:
    told = {
        subprocess.run(
            [sys.executable, "-c", NAMES],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("random", "0", "1")
    }
    assert len(told) == 1 and told.pop().count(b"PromptPages") == 2
