"""Parts whose bytes change between NIXL's write and the copy out of the slot: found, asked for again, never read."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvferry._core import GpuUnavailable, gpu_device_count
from kvferry.daemon.cli.system import SystemSpec, start_replicas
from kvferry.radix.digests import prompt_digests
from kvferry.workers.models.interface import Prompt
from kvferry.workers.models.synthetic import output_token
from tests.support.devices import WrappedStack
from tests.support.engines import Engines, Turn, settled, stats
from tests.support.stacks import SmallSystem

PAGE = 16
WITH_FLIPS = str(Path(__file__).parents[2] / "support" / "with_flips.py")
pytestmark = pytest.mark.timeout(120)


def flipping(every: int) -> WrappedStack:
    """Its decode daemon meets a flipped bit in one of so many of the parts that it receives."""
    return WrappedStack("decode-0", [sys.executable, WITH_FLIPS], {"FLIP_EVERY": str(every)})


def ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(32_000) for _ in range(n)]


def right(prompt: list[int], turn: Turn) -> bool:
    """The output follows from the prompt, and the worker has looked at every byte of its pages."""
    array = np.array(prompt, dtype=np.uint32)
    digests = prompt_digests(array, page_size=PAGE)
    want = [output_token(Prompt(array, digests.digests, digests.tail), i) for i in range(len(turn.output))]
    return turn.error is None and turn.output == want


def turns_with_flips(spec: SystemSpec, every: int) -> None:
    """Prompts of several parts each, all at a time: every one is answered rightly in the end."""
    rng = random.Random(every)
    prompts = [ids(rng, rng.randrange(100, 300)) for _ in range(12)]
    with flipping(every) as stack:
        prefills, decodes = start_replicas(stack, spec)
        with Engines(prefills[0], decodes[0]) as engines:
            turns = engines.turns(prompts, 5)
            assert [turn.details for turn in turns if turn.error] == []
            assert all(right(prompt, turn) for prompt, turn in zip(prompts, turns, strict=True))
            again = engines.turns(prompts, 5)  # what was published is right, too
            assert all(right(prompt, turn) for prompt, turn in zip(prompts, again, strict=True))
            assert all(turn.matched == len(p) // PAGE * PAGE for turn, p in zip(again, prompts, strict=True))
        decode, prefill = settled(decodes[0]), settled(prefills[0])
        for side in (decode, prefill):
            assert [(peer.state, peer.checksums) for peer in side.peers] == [("up", True)]
        assert decode.transfers.mismatched_parts > 0
        assert decode.transfers.asked_again >= 1
        failed = {reason.reason: reason.count for reason in decode.transfers.failures}
        assert 1 <= failed.pop("wrong_parts") <= decode.transfers.mismatched_parts
        assert not failed
        assert decode.transfers.parts + decode.transfers.mismatched_parts + decode.transfers.dropped_parts == (
            prefill.transfers.parts
        ), "each part that was sent was published, found wrong, or came for a transfer that had been given up"


def test_flipped_bits_are_asked_for_again_and_no_wrong_byte_is_read() -> None:
    small = ["--slot-bytes", "6000"]
    spec = SmallSystem(page_size=PAGE, decode_flags=["--checksums", "on", *small], prefill_flags=small)
    turns_with_flips(spec, every=8)


def test_a_path_that_flips_every_part_ends_in_a_clear_failure() -> None:
    """Here the prefill daemon alone wants checksums, which is enough."""
    with flipping(every=1) as stack:
        prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE, prefill_flags=["--checksums", "on"]))
        with Engines(prefills[0], decodes[0]) as engines:
            turn = engines.turn(list(range(40)), 4)
        assert turn.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "pages were asked for 16 times; the bound is 16; at last: part.checksum is 0x" in turn.details
        decode = settled(decodes[0])
        assert (decode.transfers.mismatched_parts, decode.transfers.parts, decode.pool.cached) == (16, 0, 0)
        assert stats(prefills[0]).peers[0].checksums


@pytest.mark.gpu
def test_flipped_bits_on_a_gpu() -> None:
    try:
        found = gpu_device_count()
    except GpuUnavailable as error:
        pytest.skip(f"needs a GPU: {error}")
    if found == 0:
        pytest.skip("needs a GPU; there is none")
    flags = ["--slot-bytes", "8192", "--device", "cuda:0", "--checksums", "on"]
    spec = SystemSpec(
        page_size=PAGE,
        decode_flags=flags,
        prefill_flags=flags,
        decode_pool_bytes=32 << 20,
        prefill_pool_bytes=32 << 20,
    )
    turns_with_flips(spec, every=int(os.environ.get("FLIP_EVERY", "8")))
