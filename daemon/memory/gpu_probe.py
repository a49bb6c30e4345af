"""Facts of this machine's GPUs by the CUDA driver, without making a context on any of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from kvferry.transfer.mapping.populate import cpus_near

UNIFIED_ADDRESSING = 41  # CU_DEVICE_ATTRIBUTE_...: IPC of memory needs it
NAME_BYTES = 100


class DriverError(Exception):
    """No driver, or a call of it failed."""


class Driver:
    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise DriverError("no CUDA driver") from None
        self._call("cuInit", 0)

    def version(self) -> int:
        """The version of CUDA: 12080 for 12.8."""
        found = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def count(self) -> int:
        found = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def name(self, device: int) -> str:
        text = ctypes.create_string_buffer(NAME_BYTES)
        self._call("cuDeviceGetName", text, NAME_BYTES, self._device(device))
        return text.value.decode(errors="replace")

    def total_bytes(self, device: int) -> int:
        found = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(found), self._device(device))
        return found.value

    def shares_memory(self, device: int) -> bool:
        found = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(found), UNIFIED_ADDRESSING, self._device(device))
        return bool(found.value)

    def peers(self, device: int, other: int) -> bool:
        found = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(found), self._device(device), self._device(other))
        return bool(found.value)

    def memory_node(self, device: int) -> int | None:
        """The node of host memory that it is on; None where the system does not say."""
        text = ctypes.create_string_buffer(NAME_BYTES)
        self._call("cuDeviceGetPCIBusId", text, NAME_BYTES, self._device(device))
        try:
            node = int(Path(f"/sys/bus/pci/devices/{text.value.decode().lower()}/numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def _device(self, ordinal: int) -> ctypes.c_int:
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ordinal)
        return handle

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise DriverError(f"{name} gives CUDA error {status}")


def near_cpus(devices: Sequence[int]) -> list[frozenset[int]]:
    """The CPUs beside each of these GPUs; none where there is no GPU, or nothing tells."""
    if not devices:
        return []
    try:
        driver = Driver()
        nodes = [driver.memory_node(device) for device in devices]
    except DriverError:
        return []
    return [cpus for node in nodes if node is not None and (cpus := cpus_near(node))]
