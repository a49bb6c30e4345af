"""The way back of pools on GPUs, and of pools that are memory of engines. The synthetic workers check every byte of
what they are told is held, before they compute behind it."""

from __future__ import annotations

import dataclasses
import random

import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, SystemSpec
from kvferry.proto.cache_pb2 import SideStats
from tests.support.devices import need
from tests.support.engines import Engines, settled
from tests.system.serving.engine_pools import on_engines
from tests.system.serving.ranks import PAGE, Case, ids, spec_of
from tests.system.way_back.conversations import ALWAYS, converse, started

CPU, ONE, TWO = ("cpu",), ("cuda:0",), ("cuda:0", "cuda:1")
WHOLE = Case(1, 1, ("page", "layer"), slot_bytes=1 << 20)
IN_PARTS = Case(1, 1, ("layer", "layer-blocks"), slot_bytes=4096)  # a row in several
PLACES = [
    pytest.param(CPU, CPU, IN_PARTS, id="in shared memory"),
    pytest.param(ONE, ONE, WHOLE, id="both on one GPU", marks=pytest.mark.gpu),
    pytest.param(ONE, ONE, IN_PARTS, id="both on one GPU, in parts", marks=pytest.mark.gpu),
    pytest.param(ONE, TWO[1:], WHOLE, id="a GPU each", marks=pytest.mark.gpu),
    pytest.param(ONE, TWO, Case(1, 2, ("page", "layer"), slot_bytes=1 << 20), id="1 to 2 GPUs", marks=pytest.mark.gpu),
    pytest.param(TWO, ONE, Case(2, 1, ("layer", "page"), slot_bytes=1 << 20), id="2 to 1 GPUs", marks=pytest.mark.gpu),
]


def system(prefill: tuple[str, ...], decode: tuple[str, ...], case: Case, decode_pages: int = 200) -> SystemSpec:
    """Two prefill servers, on the same devices."""
    if gpus := [int(device.removeprefix("cuda:")) for device in {*prefill, *decode} - {*CPU}]:
        need(*gpus)
    spec = spec_of(case, decode_pages)
    return dataclasses.replace(
        spec,
        prefills=2,
        prefill_device=",".join(prefill),
        decode_device=",".join(decode),
        prefill_flags=[*spec.prefill_flags, *ALWAYS],
        decode_flags=[*spec.decode_flags, *ALWAYS],
    )


def went_back(prefills: tuple[Replica, ...], decode: Replica) -> int:
    """Pages that went back, of which nothing was lost, wrong or left behind."""
    sides: list[SideStats] = [settled(each) for each in (*prefills, decode)]
    for side in sides:
        assert side.way_back.off_because == ""
        assert side.transfers.mismatched_parts == side.way_back.transfers.mismatched_parts == 0
        assert side.way_back.transfers.active == 0
    fetched = sum(side.way_back.transfers.delta_pages for side in sides[:-1])
    assert fetched == sides[-1].way_back.transfers.delta_pages
    return fetched


@pytest.mark.nightly
@pytest.mark.parametrize(("prefill", "decode", "case"), PLACES)
def test_each_server_has_back_what_the_other_turns_brought(
    stack: Stack, prefill: tuple[str, ...], decode: tuple[str, ...], case: Case
) -> None:
    prefills, decodes = started(stack, system(prefill, decode, case))
    turns = converse(decodes[0], prefills, 6, seed=1)
    assert [turn.prefill_matched for turn in turns] == [turn.matched for turn in turns], "its output, too"
    assert turns[-1].matched > 5 * 50 // PAGE * PAGE
    assert went_back(prefills, decodes[0]) > 0


@pytest.mark.nightly
@pytest.mark.parametrize(("prefill", "decode", "case"), PLACES)
def test_pages_in_memory_of_engines_go_back_too(
    stack: Stack, prefill: tuple[str, ...], decode: tuple[str, ...], case: Case
) -> None:
    spec = on_engines(system(prefill, decode, case), 100, case, (",".join(prefill), ",".join(decode)))
    prefills, decodes = started(stack, spec)
    turns = converse(decodes[0], prefills, 4, seed=3)
    assert [turn.prefill_matched for turn in turns] == [turn.matched for turn in turns]
    assert went_back(prefills, decodes[0]) > 0


@pytest.mark.parametrize(("prefill", "decode", "case"), PLACES)
def test_what_comes_from_the_host_tier_goes_back(
    stack: Stack, prefill: tuple[str, ...], decode: tuple[str, ...], case: Case
) -> None:
    """Pools smaller than the chats: pages are spilled and restored while others are sent, both ways at a time."""
    prefills, decodes = started(stack, system(prefill, decode, case, decode_pages=60))
    rng = random.Random(2)
    histories = [ids(rng, 6 * PAGE + i) for i in range(10)]
    for number in range(4):
        with Engines(prefills[number % 2], decodes[0]) as engines:
            for i, turn in enumerate(engines.turns(histories, 8)):
                assert turn.error is None, turn.details
                histories[i] = histories[i] + turn.output + ids(rng, 10)
    assert went_back(prefills, decodes[0]) > 0
    assert settled(decodes[0]).tiers.restored_pages > 0
