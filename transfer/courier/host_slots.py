"""Slots in host memory, which a courier and its daemon both map: [receive slots][send slots] of one memory file."""

from __future__ import annotations

import logging
import mmap

from kvferry.transfer.courier.config import CourierConfig
from kvferry.transfer.courier.messages import check_range

log = logging.getLogger(__name__)


class HostSlots:
    """The daemon's mapping, until `close`."""

    def __init__(self, config: CourierConfig, memory_fd: int) -> None:
        self._config = config
        self._memory = mmap.mmap(memory_fd, config.memory_bytes)
        self._view = memoryview(self._memory)

    def receive_slot(self, slot: int) -> memoryview:
        """The slot's bytes, writable. MessageError for one that is not there, as the other."""
        check_range("receive slot", slot, 0, self._config.receive_slots - 1)
        return self._slot(slot)

    def send_slot(self, slot: int) -> memoryview:
        check_range("send slot", slot, 0, self._config.send_slots - 1)
        return self._slot(self._config.receive_slots + slot)

    def _slot(self, index: int) -> memoryview:
        return self._view[index * self._config.slot_bytes : (index + 1) * self._config.slot_bytes]

    def close(self) -> None:
        self._view.release()
        try:
            self._memory.close()
        except BufferError:  # views that callers still hold keep the memory until they go
            log.debug("slots of a courier that was ended are still in use")
