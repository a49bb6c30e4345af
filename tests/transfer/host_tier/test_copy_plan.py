"""The plan of copies between the tiers: the strategy that is chosen, its environment variables, and its statistics."""

import pytest

from kvferry.transfer.host_tier.copy_plan import (
    ENVIRONMENT,
    STRATEGIES,
    GpuCopies,
    choose,
    choose_for_list,
    from_environment,
)
from kvferry.transfer.host_tier.copy_strategies import CopyStatistics, StrategyCounts, check_environment

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


@pytest.mark.parametrize(
    ("fragment", "fragments", "runs", "strategy"),
    [
        (32 * KIB, 64, 1, "pitched"),
        (4 * KIB, 48, 1, "pitched"),
        (4 * KIB, 48, 3, "pitched"),  # 64 KiB a run
        (4 * KIB, 48, 4, "staged"),
        (4 * KIB, 48, 0, "staged"),  # too far apart for a copy engine
        (4 * KIB, 8, 1, "batch"),
        (512 * KIB, 64, 1, "batch"),
    ],
)
def test_choice_beside_kernels_that_hold_the_gpu(fragment: int, fragments: int, runs: int, strategy: str) -> None:
    assert choose(fragment, fragments, 64, runs, busy=True) == strategy


@pytest.mark.parametrize(
    ("fragment", "under_way", "strategy"),
    [
        (4 * KIB, 0, "pitched"),
        (4 * KIB, (44 << 20) - 1, "pitched"),
        (4 * KIB, 44 << 20, "staged"),
        (16 * KIB, 1 << 30, "pitched"),  # long enough for a copy engine
    ],
)
def test_choice_beside_such_kernels_where_many_copies_are_under_way(
    fragment: int, under_way: int, strategy: str
) -> None:
    assert choose(fragment, 48, 128, 1, busy=True, under_way=under_way) == strategy


@pytest.mark.parametrize(
    ("item", "items", "busy", "strategy"),
    [
        (24 * KIB, 4096, False, "kernel"),
        (24 * KIB, 4096, True, "batch"),
        (255 * KIB, 3, False, "kernel"),
        (256 * KIB, 3, False, "batch"),
        (4 * KIB, 2, False, "batch"),
        (0, 0, False, "batch"),
    ],
)
def test_choice_for_a_list(item: int, items: int, busy: bool, strategy: str) -> None:
    assert choose_for_list(item * items, items, busy) == strategy


def nothing() -> int:
    return 0


class Idle:
    """An engine that is asked whether the GPU is busy."""

    def __init__(self, mps: bool, restored: int = 0) -> None:
        self.asked = 0
        self.mps = mps
        self.under_way_from_host = restored

    def busy(self) -> bool:
        self.asked += 1
        return self.asked > 1


class Pages:
    runs = 1

    def __init__(self, fragment_bytes: int, fragments: int = 64) -> None:
        self.fragment_bytes, self.fragments, self.row_bytes = fragment_bytes, fragments, fragment_bytes * fragments


def test_the_gpu_is_asked_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    engine, pages = Idle(mps=True), Pages(8 * KIB)
    copies = GpuCopies(engine)  # type: ignore[arg-type]
    assert [copies.plan(pages, 10, nothing) for _ in range(2)] == ["staged", "pitched"]  # type: ignore[arg-type]
    assert copies.plan(Pages(512 * KIB), 10, nothing) == "batch"  # type: ignore[arg-type]
    monkeypatch.setenv(ENVIRONMENT, "loop")
    assert GpuCopies(engine).plan(pages, 10, nothing) == "loop"  # type: ignore[arg-type]
    assert GpuCopies(engine, "kernel").plan(pages, 10, nothing) == "kernel"  # type: ignore[arg-type]
    assert engine.asked == 2


def test_where_processes_have_the_gpu_by_turns_only_short_rows_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    engine = Idle(mps=False)
    copies = GpuCopies(engine)  # type: ignore[arg-type]
    assert {copies.plan(Pages(32 * KIB), 10, nothing) for _ in range(3)} == {"staged"}  # type: ignore[arg-type]
    assert engine.asked == 0
    short = Pages(4 * KIB, 8)
    assert [copies.plan(short, 100, nothing) for _ in range(2)] == ["kernel", "batch"]  # type: ignore[arg-type]


def test_spills_of_long_fragments_take_nothing_of_an_engines_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    copies = GpuCopies(Idle(mps=False))  # type: ignore[arg-type]
    assert copies.plan_spill(Pages(32 * KIB), 10) == "batch"  # type: ignore[arg-type]
    assert copies.plan_spill(Pages(32 * KIB - 16), 10) == "staged"  # type: ignore[arg-type]
    assert GpuCopies(Idle(mps=True)).plan_spill(Pages(32 * KIB), 10) == "staged"  # type: ignore[arg-type]
    assert GpuCopies(Idle(mps=False), "kernel").plan_spill(Pages(32 * KIB), 10) == "kernel"  # type: ignore[arg-type]


def test_spills_of_long_fragments_are_staged_while_pages_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    restores = Idle(mps=False, restored=2 << 20)
    copies = GpuCopies(Idle(mps=False), restores=restores)  # type: ignore[arg-type]
    assert copies.plan_spill(Pages(32 * KIB), 10) == "staged"  # type: ignore[arg-type]
    assert copies.plan_spill(Pages(512 * KIB), 10) == "batch"  # type: ignore[arg-type]
    restores.under_way_from_host = 0
    assert copies.plan_spill(Pages(32 * KIB), 10) == "batch"  # type: ignore[arg-type]


def test_environment() -> None:
    assert from_environment({}) is None
    assert from_environment({ENVIRONMENT: "auto"}) is None
    assert from_environment({ENVIRONMENT: ""}) is None
    assert [from_environment({ENVIRONMENT: name}) for name in STRATEGIES] == list(STRATEGIES)
    with pytest.raises(ValueError, match=r"KVFERRY_COPY is 'dma'; it must be auto, batch, loop, kernel, .*, memcpy"):
        from_environment({ENVIRONMENT: "dma"})


def test_the_strategy_of_the_cpu_is_none_of_a_gpu() -> None:
    for name in ("", "auto", "staged"):
        for on_gpus in (False, True):
            check_environment({ENVIRONMENT: name}, on_gpus=on_gpus)
    check_environment({ENVIRONMENT: "memcpy"}, on_gpus=False)
    with pytest.raises(ValueError, match="KVFERRY_COPY is memcpy, the CPU's copies, but the pool is on GPUs"):
        check_environment({ENVIRONMENT: "memcpy"}, on_gpus=True)
    with pytest.raises(ValueError, match="KVFERRY_COPY is memcpy"):
        from_environment({ENVIRONMENT: "memcpy"})
    with pytest.raises(ValueError, match="KVFERRY_COPY is 'x'"):
        check_environment({ENVIRONMENT: "x"}, on_gpus=False)


def test_statistics_add_up() -> None:
    first = CopyStatistics({"batch": StrategyCounts(1, 2, 3), "loop": StrategyCounts()}, {"a": 1}, "batch")
    second = CopyStatistics({"batch": StrategyCounts(10, 20, 30), "memcpy": StrategyCounts(4, 5, 6)}, {"a": 2, "b": 3})
    together = first + second
    assert together.strategies == {
        "batch": StrategyCounts(11, 22, 33),
        "loop": StrategyCounts(),
        "memcpy": StrategyCounts(4, 5, 6),
    }
    assert (together.fallbacks, together.forced) == ({"a": 3, "b": 3}, "auto")
