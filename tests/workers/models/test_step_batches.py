"""Decode steps of several requests at once: the tokens of each are those of one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvferry.client.rank_pools import RankPools
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout, StorageOrder
from kvferry.workers.models.compute_thread import ComputeThread
from kvferry.workers.models.interface import BatchCompute, Prompt, SequenceCompute, Step
from kvferry.workers.models.sampling import Sampling
from kvferry.workers.models.step_batches import StepBatches
from kvferry.workers.models.transformer import loaded
from tests.support.tiny_models import plain_tokens, random_model

PAGE = 8
PROMPTS = [list(range(1, 4)), list(range(5, 42)), list(range(50, 66))]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mixtral"])
def test_requests_of_different_lengths(family: str, ranks: int) -> None:
    network = random_model(family)
    model = loaded(network, family, "1")
    shape = model.shape
    geometry = KVGeometry(shape.layers, shape.kv_heads, shape.head_dim, shape.dtype, PAGE, Layout.PAGE_NHD)
    rng = np.random.default_rng(3)  # what nobody has written holds anything, no numbers too
    memories = [rng.integers(0, 255, 40 * geometry.page_bytes // ranks, dtype=np.uint8) for _ in range(ranks)]
    compute = model.compute(RankPools(geometry, StorageOrder.PAGE_MAJOR, 40, memories))
    pages = iter(int(page) for page in rng.permutation(40))
    sequences, outputs = [], []
    for prompt in PROMPTS:
        own = [next(pages) for _ in range(-(-len(prompt) // PAGE))]
        sequence = compute.sequence(
            Prompt(np.array(prompt, dtype=np.uint32), b"", b""), own, Sampling(), shared_tokens=0
        )
        sequence.resume(0)
        sequence.prompt(0, len(prompt))
        sequence.add_pages([next(pages) for _ in range(2)])
        sequences.append(sequence)
        outputs.append([sequence.first_token()])
    for number in range(9):
        some = range(len(PROMPTS)) if number % 3 else (2, 0)  # those that step together change
        steps = [Step(sequences[i], outputs[i][-1], len(PROMPTS[i]) + len(outputs[i]) - 1) for i in some]
        for i, token in zip(some, compute.steps(steps), strict=True):
            outputs[i].append(token)
    outputs[1].append(sequences[1].step(outputs[1][-1], len(PROMPTS[1]) + len(outputs[1]) - 1))  # alone, after them
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output == plain_tokens(network, prompt, len(output), chunk_tokens=len(prompt))


@pytest.mark.gpu
def test_a_batch_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    network = random_model("qwen2").to("cuda")
    model = loaded(network, "qwen2", "1")
    shape = model.shape
    geometry = KVGeometry(shape.layers, shape.kv_heads, shape.head_dim, shape.dtype, PAGE, Layout.PAGE_NHD)
    pool = torch.full((40, geometry.page_bytes), 0xFF, dtype=torch.uint8, device="cuda")  # no numbers
    compute = model.compute(RankPools.single(pool, geometry))
    sequences = []
    for i, prompt in enumerate(PROMPTS):
        spec = Prompt(np.array(prompt, dtype=np.uint32), b"", b"")
        sequence = compute.sequence(spec, range(10 * i, 10 * i + 7), Sampling(), shared_tokens=0)
        sequence.resume(0)
        sequence.prompt(0, len(prompt))
        sequences.append(sequence)
    outputs = [[sequence.first_token()] for sequence in sequences]
    for _ in range(6):
        steps = [
            Step(sequence, output[-1], len(prompt) + len(output) - 1)
            for sequence, output, prompt in zip(sequences, outputs, PROMPTS, strict=True)
        ]
        for output, token in zip(outputs, compute.steps(steps), strict=True):
            output.append(token)
    plain = network.cpu()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output == plain_tokens(plain, prompt, len(output), chunk_tokens=len(prompt))


@dataclass
class Counting:
    """Gives position + 1; `gate` holds a batch back."""

    batches: list[int] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    running: threading.Event = field(default_factory=threading.Event)

    def steps(self, steps: Sequence[Step]) -> list[int]:
        self.running.set()
        assert self.gate.wait(10)
        self.batches.append(len(steps))
        return [step.position + 1 for step in steps]


NOTHING = cast(SequenceCompute, None)


async def decoding(batches: StepBatches, steps: int) -> int:
    token = 0
    async with batches.decoding() as engine:
        for position in range(steps):
            await engine.step(position)
            token = await engine.compute(NOTHING, token, position)
            assert token == position + 1
    return token


def run(scenario: Any, most: int) -> Counting:
    async def main() -> Counting:
        thread, counting = ComputeThread(), Counting()
        try:
            await scenario(StepBatches(thread, cast(BatchCompute, counting), most), counting)
        finally:
            counting.gate.set()
            thread.close()
        return counting

    return asyncio.run(main())


def test_who_decodes_steps_together() -> None:
    async def scenario(batches: StepBatches, counting: Counting) -> None:
        counting.gate.set()
        assert await asyncio.gather(*(decoding(batches, steps) for steps in (3, 5, 5))) == [3, 5, 5]

    assert run(scenario, 8).batches == [3, 3, 3, 2, 2]


def test_a_full_batch_goes_and_the_others_take_turns() -> None:
    async def scenario(batches: StepBatches, counting: Counting) -> None:
        counting.gate.set()
        await asyncio.gather(*(decoding(batches, 4) for _ in range(5)))

    counting = run(scenario, 2)
    assert sum(counting.batches) == 20 and max(counting.batches) == 2


def test_a_cancelled_step_is_over_when_its_caller_goes_on() -> None:
    async def scenario(batches: StepBatches, counting: Counting) -> None:
        tasks = [asyncio.create_task(decoding(batches, 2)) for _ in range(2)]
        while not counting.running.is_set():
            await asyncio.sleep(0.001)
        late = asyncio.create_task(decoding(batches, 1))
        await asyncio.sleep(0.01)
        late.cancel()  # never started
        tasks[0].cancel()  # runs
        done, _ = await asyncio.wait([late, tasks[0]], timeout=0.05)
        assert done == {late}
        counting.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert await tasks[1] == 2

    assert run(scenario, 8).batches == [2, 1]


def test_an_error_is_that_of_each_request() -> None:
    async def scenario(batches: StepBatches, counting: Counting) -> None:
        counting.steps = lambda steps: [][1]  # type: ignore[method-assign]
        results = await asyncio.gather(*(decoding(batches, 1) for _ in range(2)), return_exceptions=True)
        assert [type(result) for result in results] == [IndexError, IndexError]

    run(scenario, 8)


@pytest.mark.parametrize("pause", range(6))
def test_a_step_that_comes_as_the_last_batch_ends_is_computed(pause: int) -> None:
    async def scenario(batches: StepBatches, counting: Counting) -> None:
        counting.gate.set()

        async def steps() -> None:
            async with batches.decoding() as engine:
                for position in range(20):
                    for _ in range(pause):
                        await asyncio.sleep(0)
                    assert await engine.compute(NOTHING, 0, position) == position + 1

        await asyncio.wait_for(steps(), 5)

    assert run(scenario, 8).batches == [1] * 20
