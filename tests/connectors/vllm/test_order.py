"""Finding out in which order a kernel keeps the tokens of a block."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.connectors.vllm.order import order_of


@pytest.mark.parametrize("tokens", [1, 2, 16, 32, 96])
def test_any_order_of_the_elements_is_found(tokens: int) -> None:
    order = np.random.default_rng(tokens).permutation(np.arange(tokens).repeat(6)).astype(np.int32)
    found = order_of(lambda marks: marks[order], tokens)
    assert found.dtype == np.int32 and (found == order).all()


def test_elements_of_no_token_and_of_several_are_refused() -> None:
    def padded(marks: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.append(marks, False)

    def shared(marks: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.append(marks, marks[0])

    with pytest.raises(ValueError, match="a block of 4 tokens has elements that belong to none of them"):
        order_of(padded, 4)
    with pytest.raises(ValueError, match="the 4 tokens of a block have 1 to 2 elements"):
        order_of(shared, 4)
