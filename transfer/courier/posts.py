"""Writes from a courier's send slots to the other courier's receive slots, as NIXL is given them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_PREPARED = 4  # sizes of writes that get descriptor lists


class PostAgent(Protocol):
    """The part of nixl_agent that posts use. Failures raise."""

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> object: ...

    def initialize_xfer(self, operation: str, local: object, remote: object, name: str, notif: bytes) -> object: ...

    def prep_xfer_dlist(self, agent_name: str, xfer_list: list[tuple[int, int, int]], mem_type: str) -> object: ...

    def make_prepped_xfer(
        self,
        operation: str,
        local: object,
        local_indices: list[int],
        remote: object,
        remote_indices: list[int],
        notif: bytes,
    ) -> object: ...


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """The places of one side's slots: the address of each, and its device's number (0 in host memory)."""

    memory_type: str  # "DRAM" or "VRAM"
    places: tuple[tuple[int, int], ...]

    @staticmethod
    def on_host(address: int, slots: int, slot_bytes: int) -> SlotPlaces:
        return SlotPlaces("DRAM", tuple((address + i * slot_bytes, 0) for i in range(slots)))

    @staticmethod
    def on_gpus(ranks: Sequence[tuple[int, int]], slots: int, slot_bytes: int) -> SlotPlaces:
        """`ranks`: address and device of each rank's slots, which are slots / len(ranks) each."""
        each = slots // len(ranks)
        return SlotPlaces(
            "VRAM", tuple((address + i * slot_bytes, device) for address, device in ranks for i in range(each))
        )

    def descriptor(self, slot: int, nbytes: int) -> tuple[int, int, int]:
        """The first bytes of a slot: address, size, device."""
        address, device = self.places[slot]
        return address, nbytes, device


class Posts:
    """Makes the handles of one pair of couriers. Most writes have one size, that of a full part: a size that comes
    twice in a row gets descriptor lists of all slots, from which a handle is made in a third of the time."""

    def __init__(self, agent: PostAgent, remote_name: str, local: SlotPlaces, remote: SlotPlaces) -> None:
        self._agent = agent
        self._remote_name = remote_name
        self._local = local
        self._remote = remote
        self._prepared: dict[int, tuple[object, object]] = {}  # by size; held as long as their agent lives
        self._last_nbytes = 0

    def make(self, send_slot: int, remote_slot: int, nbytes: int, notification: bytes) -> object:
        """The handle of a write of the slots' first bytes. Raises as NIXL does."""
        lists = self._lists(nbytes)
        if lists is not None:
            local, remote = lists
            return self._agent.make_prepped_xfer("WRITE", local, [send_slot], remote, [remote_slot], notification)
        return self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs([self._local.descriptor(send_slot, nbytes)], self._local.memory_type),
            self._agent.get_xfer_descs([self._remote.descriptor(remote_slot, nbytes)], self._remote.memory_type),
            self._remote_name,
            notification,
        )

    def _lists(self, nbytes: int) -> tuple[object, object] | None:
        repeated, self._last_nbytes = nbytes == self._last_nbytes, nbytes
        if repeated and nbytes not in self._prepared and len(self._prepared) < MAX_PREPARED:
            self._prepared[nbytes] = (
                self._prepare("NIXL_INIT_AGENT", self._local, nbytes),
                self._prepare(self._remote_name, self._remote, nbytes),
            )
        return self._prepared.get(nbytes)

    def _prepare(self, name: str, of: SlotPlaces, nbytes: int) -> object:
        descriptors = [of.descriptor(slot, nbytes) for slot in range(len(of.places))]
        return self._agent.prep_xfer_dlist(name, descriptors, of.memory_type)
