"""Sampling: greedy, seeds, frequencies, top-k and top-p, and refused values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvferry.proto import engine_pb2
from kvferry.workers.models.sampling import Sampling, sample, uniform

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])


def test_greedy_takes_the_best() -> None:
    assert sample(LOGITS, Sampling(), 0) == 1


def test_a_token_depends_on_seed_and_position_alone() -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    tokens = [sample(LOGITS, sampling, position) for position in range(40)]
    assert tokens == [sample(LOGITS, sampling, position) for position in range(40)]
    assert len(set(tokens)) > 2
    assert tokens != [sample(LOGITS, sampling._replace(seed=6), position) for position in range(40)]


def test_frequencies_are_the_softmax() -> None:
    sampling = Sampling(temperature=2.0, seed=1)
    draws = 4000
    counts = np.bincount([sample(LOGITS, sampling, position) for position in range(draws)], minlength=5)
    expected = (LOGITS.double() / 2).softmax(0).numpy()
    assert np.abs(counts / draws - expected).max() < 0.03


def test_top_k_and_top_p_cut_the_tail() -> None:
    def seen(sampling: Sampling) -> set[int]:
        return {sample(LOGITS, sampling, position) for position in range(300)}

    assert seen(Sampling(temperature=5.0, top_k=2)) == {1, 4}
    assert seen(Sampling(temperature=5.0, top_k=1)) == {1}
    assert seen(Sampling(temperature=1.0, top_p=0.01)) == {1}
    probabilities = LOGITS.double().softmax(0)
    reach = float(probabilities[1] + probabilities[4])
    assert seen(Sampling(temperature=1.0, top_p=reach - 0.01)) == {1, 4}
    assert seen(Sampling(temperature=1.0, top_p=reach + 0.01)) == {1, 4, 2}
    assert seen(Sampling(temperature=5.0)) == {0, 1, 2, 3, 4}


def test_uniform_is_in_range_and_spread() -> None:
    numbers = [uniform(3, position) for position in range(1000)]
    assert all(0 <= number < 1 for number in numbers)
    assert math.isclose(sum(numbers) / 1000, 0.5, abs_tol=0.05)
    assert uniform(2**64 - 1, 2**40) != uniform(2**64 - 1, 2**40 + 1)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (engine_pb2.Sampling(temperature=-0.5), "temperature"),
        (engine_pb2.Sampling(temperature=math.nan), "temperature"),
        (engine_pb2.Sampling(top_p=2), "top_p"),
    ],
)
def test_bad_values_name_the_field(message: engine_pb2.Sampling, field: str) -> None:
    with pytest.raises(ValueError, match=f"sampling.{field}"):
        Sampling.from_proto(message)


def test_zero_top_p_means_off() -> None:
    assert Sampling.from_proto(engine_pb2.Sampling(temperature=1, top_k=3, seed=2)) == Sampling(1, 1.0, 3, 2)
