"""Models of a given shape with random weights."""

from __future__ import annotations

import pytest
import torch

from kvferry.workers.models.random_weights import SHAPES, ModelShape, parse_shape, random_model


def test_a_shape_is_a_name_or_a_list_of_numbers() -> None:
    assert parse_shape("llama-8b") is SHAPES["llama-8b"]
    text = "layers=2,hidden=64,heads=4,kv-heads=2,head_dim=16,intermediate=96"
    assert parse_shape(text) == ModelShape(2, 64, 4, 2, 16, 96)
    assert parse_shape(str(SHAPES["tiny"])) == SHAPES["tiny"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama-9b", "'llama-9b' is neither one of"),
        ("layers=2", "lacks hidden, heads"),
        ("layers=two", "shape.layers is 'two'"),
        (
            "layers=2,hidden=64,heads=4,kv_heads=3,head_dim=16,intermediate=96",
            "kv_heads is 3; it must divide heads = 4",
        ),
        ("layers=0,hidden=64,heads=4,kv_heads=2,head_dim=16,intermediate=96", "shape.layers is 0"),
        ("layers=2,hidden=64,heads=4,kv_heads=2,head_dim=15,intermediate=96", "head_dim is 15; it must be even"),
    ],
)
def test_a_wrong_shape_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_shape(text)


def test_two_models_of_one_shape_have_the_same_weights() -> None:
    shape = ModelShape(2, 64, 4, 2, 16, 96)
    first, second = (random_model(shape, dtype="float32", threads=1) for _ in range(2))
    assert (first.fingerprint, first.revision, first.shape) == (second.fingerprint, second.revision, second.shape)
    for mine, other in zip(first.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert (first.shape.layers, first.shape.kv_heads, first.shape.head_dim) == (2, 2, 16)
    with torch.inference_mode():
        logits = first.network(input_ids=torch.arange(40).unsqueeze(0)).logits[0]
    assert len({int(token) for token in logits.argmax(-1)}) > 5  # no constant
