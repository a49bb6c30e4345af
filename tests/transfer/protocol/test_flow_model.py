"""A sender and a receiver driven by random steps of a `Loop`, whose oracle sees harm when a guard is taken away."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.transfer.geometry.kv_geometry import CacheShape, KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.rank_lanes import shards_of
from kvferry.transfer.protocol.coverage import Coverage
from kvferry.transfer.protocol.credit_groups import CreditGroups
from kvferry.transfer.protocol.receiver import Receiver
from kvferry.transfer.protocol.slots import Credit, CreditPurse, CreditTable, PartHeader, PartNotice, SlotError
from tests.transfer.protocol.flow_loop import Loop
from tests.transfer.protocol.flow_pools import Sizes, Violation, in_one_run

Step = Callable[[Loop, int], None]
FLOW: list[Step] = [
    Loop.step_open,
    Loop.step_control,
    Loop.step_progress,
    Loop.step_gather,
    Loop.step_gathered,
    Loop.step_write,
    Loop.step_report,
    Loop.step_notice,
    Loop.step_scatter,
]
REPEATS: list[Step] = [Loop.step_repeat, Loop.step_other_epoch]
ABORTS: list[Step] = [Loop.step_end, Loop.step_gather_failed, Loop.step_scatter_failed]


def one_rank(page_bytes: int) -> KVGeometry:
    return KVGeometry(layers=1, kv_heads=1, head_dim=page_bytes, dtype="uint8", page_size=1, tensors=1)


def in_runs(geometry: KVGeometry, each: int) -> KVGeometry:
    """An engine's with that many runs of a head in a layer, or as many as there may be."""
    return replace(geometry, head_runs=min(each, geometry.tensors)) if geometry.layout is Layout.ENGINE else geometry


def joins(sizes: Sizes) -> bool:
    """Its ranks can share the heads or need not, K and V that are one run lie together, and a page takes no more parts
    than a test has time for."""
    caches = sizes.geometry.caches
    apart = StorageOrder.LAYER_MAJOR in (sizes.source, sizes.target)
    return (
        all(_shared(cache, sizes) for cache in caches)
        and not (apart and any(map(in_one_run, caches)))  # refused: see `RankStorage`
        and sizes.geometry.page_bytes <= 16 * sizes.capacity
    )


def _shared(cache: KVGeometry, sizes: Sizes) -> bool:
    ranks, heads = (sizes.senders, sizes.receivers), cache.kv_heads
    shared = cache.tensors == 1 or all(heads % count == 0 or count % heads == 0 for count in ranks)
    if cache.layout is Layout.ENGINE and not cache.head_runs:
        shared = shared and len({len(shards_of(cache, count)) for count in ranks}) == 1
    return shared


orders = st.sampled_from(StorageOrder)
sizes_of = st.builds(
    Sizes,
    geometry=st.builds(one_rank, st.sampled_from([1, 7, 16, 33])),
    senders=st.just(1),
    receivers=st.just(1),
    source=st.just(StorageOrder.PAGE_MAJOR),
    target=st.just(StorageOrder.PAGE_MAJOR),
    capacity=st.sampled_from([1, 5, 16, 50, 200]),
    slots=st.sampled_from([1, 2, 3, 5, 8, 13]),
    send_slots=st.integers(1, 4),
).filter(joins)
further_caches = st.builds(
    CacheShape,
    layers=st.integers(1, 2),
    kv_heads=st.sampled_from([1, 2]),
    head_dim=st.integers(1, 3),
    dtype=st.sampled_from(["int8", "bfloat16"]),
    tensors=st.integers(1, 2),
)
sizes_over_ranks = st.builds(
    Sizes,
    geometry=st.builds(
        in_runs,
        st.builds(
            KVGeometry,
            layers=st.integers(1, 2),
            kv_heads=st.sampled_from([1, 2, 4]),
            head_dim=st.integers(1, 3),
            dtype=st.sampled_from(["int8", "bfloat16"]),
            page_size=st.integers(1, 3),
            layout=st.sampled_from(Layout),
            tensors=st.integers(1, 2),
            further=st.lists(further_caches, max_size=2).map(tuple),
        ),
        st.sampled_from([0, 1, 2]),
    ),
    senders=st.sampled_from([1, 2, 4]),
    receivers=st.sampled_from([1, 2, 4]),
    source=orders,
    target=orders,
    capacity=st.sampled_from([5, 16, 50, 200]),
    slots=st.sampled_from([1, 3, 8]),
    send_slots=st.integers(1, 3),
).filter(joins)


def plans(steps: list[Step]) -> st.SearchStrategy[list[tuple[Step, int]]]:
    return st.lists(st.tuples(st.sampled_from(steps), st.integers(0, 1000)), max_size=400)


def play(loop: Loop, plan: list[tuple[Step, int]]) -> None:
    for step, choice in plan:
        step(loop, choice)
        if loop.session_over:
            break
    loop.check()
    loop.drain()
    loop.check()


@settings(deadline=None, max_examples=150)
@given(sizes_of, plans(FLOW * 3 + REPEATS))
def test_everything_arrives_once(sizes: Sizes, plan: list[tuple[Step, int]]) -> None:
    play(Loop(sizes), plan)


@settings(deadline=None, max_examples=250)
@given(sizes_of, plans(FLOW * 3 + REPEATS + ABORTS))
def test_aborts_at_any_instant(sizes: Sizes, plan: list[tuple[Step, int]]) -> None:
    play(Loop(sizes), plan)


# A latent, and beside it a cache whose heads have K and V in one run: between any ranks, but never in a tensor each.
BESIDE_A_LATENT = Sizes(
    KVGeometry(
        1, 1, 1, "int8", 2, Layout.ENGINE, 1, 1, (CacheShape(1, 1, 1, "int8", 1), CacheShape(1, 2, 1, "int8", 2))
    ),
    senders=1,
    receivers=2,
    source=StorageOrder.PAGE_MAJOR,
    target=StorageOrder.LAYER_BLOCKS,
    capacity=5,
    slots=1,
    send_slots=1,
)


def test_what_is_drawn_over_ranks_can_be() -> None:
    apart = replace(BESIDE_A_LATENT, receivers=1, target=StorageOrder.LAYER_MAJOR)
    assert joins(BESIDE_A_LATENT) and not joins(apart)
    with pytest.raises(ValueError, match=r"geometry\.head_runs is 1: K and V of a head are one run of bytes"):
        Loop(apart)


@settings(deadline=None, max_examples=80)
@given(sizes_over_ranks, plans(FLOW * 3 + REPEATS))
@example(BESIDE_A_LATENT, [(Loop.step_open, 1)])
@example(replace(BESIDE_A_LATENT, senders=2, receivers=1), [(Loop.step_open, 2)])
@example(replace(BESIDE_A_LATENT, receivers=1), [(Loop.step_open, 1)])
def test_everything_arrives_once_on_every_rank(sizes: Sizes, plan: list[tuple[Step, int]]) -> None:
    play(Loop(sizes), plan)


@settings(deadline=None, max_examples=80)
@given(sizes_over_ranks, plans(FLOW * 3 + REPEATS + ABORTS))
def test_aborts_between_ranks(sizes: Sizes, plan: list[tuple[Step, int]]) -> None:
    play(Loop(sizes), plan)


@settings(deadline=None, max_examples=100)
@given(sizes_of, plans(FLOW * 3 + REPEATS + ABORTS))
def test_a_transport_that_notifies_too_early_ends_the_session_and_harms_no_page(
    sizes: Sizes, plan: list[tuple[Step, int]]
) -> None:
    play(Loop(sizes, notice_may_overtake=True), plan)


def play_seed(seed: int, *, notice_may_overtake: bool) -> Loop:
    rng = random.Random(seed)
    sizes = Sizes(
        one_rank(rng.choice([7, 16])),
        senders=1,
        receivers=1,
        source=StorageOrder.PAGE_MAJOR,
        target=StorageOrder.PAGE_MAJOR,
        capacity=rng.choice([5, 16, 50]),
        slots=rng.choice([1, 2, 4, 8]),
        send_slots=rng.randint(1, 3),
    )
    steps = FLOW * 4 + REPEATS + ABORTS
    loop = Loop(sizes, notice_may_overtake=notice_may_overtake)
    play(loop, [(rng.choice(steps), rng.randrange(1000)) for _ in range(600)])
    return loop


def test_seeds_do_what_they_are_for() -> None:
    loops = [play_seed(seed, notice_may_overtake=False) for seed in range(40)]
    assert sum(loop.receiver.counts.parts for loop in loops) > 500
    assert sum(loop.receiver.counts.dropped_parts for loop in loops) > 20
    assert sum(loop.receiver.counts.stale_notifications for loop in loops) > 200
    assert sum(m.ended for loop in loops for m in loop.moving.values()) > 100
    assert sum(loop.ended_while_copying for loop in loops) > 20
    assert sum(loop.kept_credits for loop in loops) > 20
    early = [play_seed(seed, notice_may_overtake=True) for seed in range(40)]
    assert sum(loop.session_over for loop in early) > 5


def any_generation(table: CreditTable, slot: int, generation: int) -> bool:
    return True


def any_page(coverage: Coverage, start: int, nbytes: int) -> range:
    return coverage.touched(start, nbytes)


def any_content(receiver: Receiver, notice: PartNotice, header: PartHeader) -> None:
    return None


def keep_the_credit(purse: CreditPurse, rank: int = 0) -> Credit:
    return purse.held()[0]


def never(groups: CreditGroups, credit: Credit) -> list[Credit]:
    groups._waiting[credit.slot // groups._slots].append(credit)
    return []


def spend_unasserted(purse: CreditPurse, credit: Credit) -> None:
    purse._unspent.discard(credit.slot)


def check_nothing(purse: CreditPurse, taken: object) -> None:
    return None


# The purse notices by itself that a credit is spent twice: that goes, too, so that the oracle has something to see.
NO_PURSE: dict[str, Callable[..., object]] = {
    "take": keep_the_credit,
    "spend": spend_unasserted,
    "check": check_nothing,
}


@pytest.mark.parametrize(
    ("owner", "without", "notice_may_overtake"),
    [
        (CreditTable, {"generation_matches": any_generation}, False),
        (Coverage, {"covered": any_page}, False),
        (Receiver, {"check_binding": any_content}, True),
        (CreditPurse, NO_PURSE, False),
        (CreditGroups, {"add": never}, False),
    ],
)
def test_without_a_guard_the_oracle_sees_harm(
    monkeypatch: pytest.MonkeyPatch, owner: type, without: dict[str, Callable[..., object]], notice_may_overtake: bool
) -> None:
    for guard, mutant in without.items():
        monkeypatch.setattr(owner, guard, mutant)
    names = f"{owner.__name__}.{', '.join(without)}"
    for seed in range(300):
        try:
            play_seed(seed, notice_may_overtake=notice_may_overtake)
        except Violation as harm:
            print(f"without {names}, seed {seed}: {harm}")
            return
        except (AssertionError, SlotError):
            continue  # the cores noticed by themselves; look for a seed in which they do not
    pytest.fail(f"300 seeds found no harm without {names}")
