import pytest

from kvferry.transfer.copy_plan import ENVIRONMENT, STRATEGIES, choose, from_environment

KIB = 1 << 10


@pytest.mark.parametrize(
    ("fragment", "fragments", "pages", "strategy"),
    [
        (32 * KIB, 64, 64, "staged"),  # the published shapes
        (32 * KIB, 160, 64, "staged"),
        (8 * KIB, 160, 32, "staged"),
        (4 * KIB, 48, 128, "staged"),
        (8 * KIB, 56, 64, "staged"),
        (8 * KIB, 72, 64, "staged"),
        (24 * KIB, 64, 64, "staged"),
        (128 * KIB, 8, 10, "staged"),
        (512 * KIB, 64, 64, "batch"),
        (2048 * KIB, 1, 64, "batch"),  # a page that is one run
        (4 * KIB, 1, 1000, "batch"),
        (4 * KIB, 2, 1, "batch"),
        (4 * KIB, 8, 100, "kernel"),  # rows of 32 KiB
        (256, 64, 1, "kernel"),
    ],
)
def test_choice(fragment: int, fragments: int, pages: int, strategy: str) -> None:
    assert choose(fragment, fragments, pages) == strategy


def test_environment() -> None:
    assert from_environment({}) is None
    assert from_environment({ENVIRONMENT: "auto"}) is None
    assert from_environment({ENVIRONMENT: ""}) is None
    assert [from_environment({ENVIRONMENT: name}) for name in STRATEGIES] == list(STRATEGIES)
    with pytest.raises(ValueError, match="KVFERRY_COPY is 'dma'; it must be auto, batch, loop, kernel, staged"):
        from_environment({ENVIRONMENT: "dma"})
