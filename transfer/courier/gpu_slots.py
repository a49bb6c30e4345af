"""Slots on GPUs: what a courier allocates for each rank, and how its daemon maps them.

A courier's slots are plain allocations, shared by CUDA IPC. A mapping outlives the courier, and the memory goes when
the last process that maps it ends or lets go, the peer's courier included: after the courier's end the peer may still
write it, and nobody else is given it (docs/internals/nvlink.md).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

from kvferry.transfer.courier.messages import HEADER_BYTES, IPC_HANDLE_BYTES, CourierSetup, RankSlots, check_range


class GpuMemory(Protocol):
    """Memory on a GPU, freed with its last reference."""

    @property
    def address(self) -> int: ...

    def ipc_handle(self) -> bytes: ...


class GpuMapping(Protocol):
    """Memory of another process on a GPU, mapped here."""

    @property
    def address(self) -> int: ...

    def close(self) -> None: ...


class SlotGpu(Protocol):
    """The part of `kvferry._core.GpuCopyEngine` that is used here. Failures raise RuntimeError."""

    def allocate(self, nbytes: int) -> GpuMemory: ...

    def open_ipc(self, handle: bytes, nbytes: int) -> GpuMapping: ...

    def read(self, address: int, nbytes: int) -> bytes: ...


GpuOf = Callable[[int], SlotGpu]
"""The GPU of that number in this process."""


@functools.cache
def gpu(device: int) -> SlotGpu:
    """One engine a device and process. Raises GpuUnavailable, a RuntimeError."""
    from kvferry._core import GpuCopyEngine  # couriers of slots in host memory go without it

    return cast(SlotGpu, GpuCopyEngine(device))


class GpuSlot(NamedTuple):
    """A slot as its daemon maps it: `nbytes` at `address` of this process, on the rank's device."""

    rank: int
    device: int
    address: int
    nbytes: int


class OwnSlots:
    """A courier's own slots, for as long as this lives."""

    def __init__(self, setup: CourierSetup, gpu_of: GpuOf = gpu) -> None:
        """Raises RuntimeError where a device is not there, has too little memory or cannot be read within 10 s."""
        from kvferry.transfer.protocol.slots import PartNotice  # with kvferry._core, as `gpu`

        self._notice = PartNotice.unpack
        self._memory: list[GpuMemory] = []  # held
        self._gpus = [gpu_of(device) for device in setup.devices]
        self._slot_bytes = setup.slot_bytes
        self._receive_slots = setup.receive_slots // len(setup.devices)  # a rank
        self.ranks = tuple(self._allocate(setup, of) for of in self._gpus)
        self._read_each_once()

    def _read_each_once(self) -> None:
        """A device's first read takes milliseconds, and shows whether it can be read: not at a session's first part."""
        if self._receive_slots:
            for slot in range(0, self._receive_slots * len(self.ranks), self._receive_slots):
                self._read_header(slot)

    def header_named_by(self, notification: bytes) -> bytes:
        """The header in the receive slot that a part's notification names; empty for another notification, or a slot
        that is not there. Waits for the device, microseconds, so that the daemon's event loop does not. Raises
        RuntimeError where it fails, or takes 10 s."""
        try:
            slot = self._notice(notification).slot
        except ValueError:
            return b""
        return self._read_header(slot) if slot < self._receive_slots * len(self.ranks) else b""

    def _read_header(self, slot: int) -> bytes:
        rank, index = divmod(slot, self._receive_slots)
        return self._gpus[rank].read(self.ranks[rank].receive_address + index * self._slot_bytes, HEADER_BYTES)

    def _allocate(self, setup: CourierSetup, of: SlotGpu) -> RankSlots:
        addresses, handles = [], []
        for slots in (setup.receive_slots, setup.send_slots):
            nbytes = slots // len(setup.devices) * setup.slot_bytes
            # Two allocations, since a peer that is given a handle can write all of the allocation.
            memory = of.allocate(nbytes) if nbytes else None
            if memory is not None:
                self._memory.append(memory)
            addresses.append(memory.address if memory else 0)
            handles.append(memory.ipc_handle() if memory else bytes(IPC_HANDLE_BYTES))
        return RankSlots(addresses[0], handles[0], addresses[1], handles[1])


class MappedSlots:
    """A courier's slots in its daemon: rank-major, mapped until `close`."""

    def __init__(
        self,
        devices: Sequence[int],
        ranks: Sequence[RankSlots],
        counts: tuple[int, int],
        slot_bytes: int,
        gpu_of: GpuOf,
    ) -> None:
        """`counts`: receive and send slots of all ranks together. Raises MessageError for what no courier says,
        RuntimeError where the memory cannot be mapped; nothing stays mapped then. May take a second on a device's first
        use."""
        check_range("ranks of the courier", len(ranks), len(devices), len(devices))
        self._devices = devices
        self._slot_bytes = slot_bytes
        self._counts = [count // len(devices) for count in counts]  # a rank
        self._gpus = [gpu_of(device) for device in devices]
        self._mappings: list[list[GpuMapping]] = [[], []]  # of receive slots and of send slots, rank by rank
        try:
            for of, rank in zip(self._gpus, ranks, strict=True):
                for kind, handle in enumerate((rank.receive_handle, rank.send_handle)):
                    if self._counts[kind]:
                        self._mappings[kind].append(of.open_ipc(handle, self._counts[kind] * slot_bytes))
        except BaseException:
            self.close()
            raise

    def receive_slot(self, slot: int) -> GpuSlot:
        """Raises MessageError for one that is not there, as the others."""
        return self._slot("receive slot", 0, slot)

    def send_slot(self, slot: int) -> GpuSlot:
        return self._slot("send slot", 1, slot)

    def _slot(self, field: str, kind: int, slot: int) -> GpuSlot:
        check_range(field, slot, 0, self._counts[kind] * len(self._devices) - 1)
        rank, index = divmod(slot, self._counts[kind])
        address = self._mappings[kind][rank].address + index * self._slot_bytes
        return GpuSlot(rank, self._devices[rank], address, self._slot_bytes)

    def close(self) -> None:
        """Unmaps them; nothing of this process may use them any more. Idempotent."""
        for mappings in self._mappings:
            while mappings:
                with contextlib.suppress(RuntimeError):
                    mappings.pop().close()
