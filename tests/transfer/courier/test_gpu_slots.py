"""A courier's slots on GPUs in its daemon: where each lies, and that nothing stays mapped. The GPUs are stand-ins that
record; tests/transfer/courier/test_gpu.py has real ones."""

from __future__ import annotations

import pytest

from kvferry.transfer.courier.gpu_slots import GpuSlot, MappedSlots, OwnSlots
from kvferry.transfer.courier.messages import CourierSetup, MessageError, RankSlots
from kvferry.transfer.protocol.slots import HEADER_BYTES, PartNotice
from tests.transfer.courier.fake_gpus import Gpu

SLOT = 1 << 16


def test_slots_are_rank_major_each_kind_in_an_allocation_of_its_own() -> None:
    gpus = {device: Gpu(device) for device in (2, 5)}
    own = OwnSlots(CourierSetup(SLOT, 4, 2, 1, (5, 2)), gpus.__getitem__)
    assert gpus[2].allocated == gpus[5].allocated == [2 * SLOT, SLOT]
    assert gpus[2].reads == gpus[5].reads == 1, "a device's first read is slow, and comes before the first part"
    assert own.ranks[0].receive_address >> 32 == 6
    assert own.ranks[1].send_address >> 32 == 3

    mapped = MappedSlots((5, 2), own.ranks, (4, 2), SLOT, gpus.__getitem__)
    base = 7 << 40
    assert [mapped.receive_slot(slot) for slot in range(4)] == [
        GpuSlot(rank, device, base + own.ranks[rank].receive_address + index * SLOT, SLOT)
        for rank, device in ((0, 5), (1, 2))
        for index in (0, 1)
    ]
    assert mapped.send_slot(1) == GpuSlot(1, 2, base + own.ranks[1].send_address, SLOT)
    for slot in (-1, 4):
        with pytest.raises(MessageError, match="receive slot is"):
            mapped.receive_slot(slot)
    with pytest.raises(MessageError, match="send slot is 2"):
        mapped.send_slot(2)
    mapped.close()
    mapped.close()
    assert gpus[2].mapped == gpus[5].mapped == []


def test_a_header_is_of_the_slot_that_the_notification_names() -> None:
    gpus = {device: Gpu(device) for device in (2, 5)}
    own = OwnSlots(CourierSetup(SLOT, 4, 2, 1, (5, 2)), gpus.__getitem__)
    for slot, (gpu, address) in enumerate(
        (gpus[device], own.ranks[rank].receive_address + index * SLOT)
        for rank, device in ((0, 5), (1, 2))
        for index in (0, 1)
    ):
        gpu.bytes[address] = b"%d" % slot * SLOT
        notice = PartNotice(epoch=1, transfer=2, slot=slot, generation=3).pack()
        assert own.header_named_by(notice) == b"%d" % slot * HEADER_BYTES
        assert own.header_named_by(notice[:-1]) == own.header_named_by(notice + b"x") == b""
    assert own.header_named_by(PartNotice(epoch=1, transfer=2, slot=4, generation=3).pack()) == b""
    reads = gpus[2].reads + gpus[5].reads
    only_sends = OwnSlots(CourierSetup(SLOT, 0, 2, 1, (5, 2)), gpus.__getitem__)
    assert only_sends.header_named_by(PartNotice(epoch=1, transfer=2, slot=0, generation=3).pack()) == b""
    assert reads == gpus[2].reads + gpus[5].reads


def test_one_kind_only() -> None:
    gpu = Gpu(0)
    own = OwnSlots(CourierSetup(SLOT, 0, 2, 1, (0,)), lambda _: gpu)
    assert own.ranks == (RankSlots(0, bytes(64), own.ranks[0].send_address, own.ranks[0].send_handle),)
    mapped = MappedSlots((0,), own.ranks, (0, 2), SLOT, lambda _: gpu)
    assert len(gpu.mapped) == 1
    with pytest.raises(MessageError, match="receive slot is 0"):
        mapped.receive_slot(0)
    mapped.close()


def test_where_one_cannot_be_mapped_none_stays_mapped() -> None:
    gpus = {0: Gpu(0), 1: Gpu(1, mappings=1)}
    own = OwnSlots(CourierSetup(SLOT, 2, 2, 1, (0, 1)), gpus.__getitem__)
    with pytest.raises(RuntimeError, match="no more"):
        MappedSlots((0, 1), own.ranks, (2, 2), SLOT, gpus.__getitem__)
    assert gpus[0].mapped == gpus[1].mapped == []
