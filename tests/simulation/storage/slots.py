"""Slots of a courier that stands in for another, in plain memory."""

from __future__ import annotations

from kvferry.transfer.courier.config import CourierConfig


class LooseSlots:
    """As `HostSlots`, as far as copies ask of them."""

    def __init__(self, config: CourierConfig) -> None:
        self.receive_slots = config.receive_slots
        self._receive = [bytearray(config.slot_bytes) for _ in range(config.receive_slots)]
        self._send = [bytearray(config.slot_bytes) for _ in range(config.send_slots)]

    def receive_slot(self, slot: int) -> memoryview:
        return memoryview(self._receive[slot])

    def send_slot(self, slot: int) -> memoryview:
        return memoryview(self._send[slot])
