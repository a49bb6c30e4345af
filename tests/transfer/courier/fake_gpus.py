"""Stand-ins for GPUs, as couriers and daemons use them for slots: they record (gpu_slots.SlotGpu)."""

from __future__ import annotations


class Memory:
    def __init__(self, address: int) -> None:
        self.address = address

    def ipc_handle(self) -> bytes:
        return b"%064d" % self.address


class Mapping:
    def __init__(self, gpu: Gpu, address: int) -> None:
        self._gpu = gpu
        self.address = address

    def close(self) -> None:
        self._gpu.mapped.remove(self.address)


class Gpu:
    """Maps a handle at the number it holds plus 7 << 40."""

    def __init__(self, device: int, mappings: int = 100) -> None:
        self.next = (device + 1) << 32
        self.allocated: list[int] = []
        self.mapped: list[int] = []
        self.mappings = mappings
        self.bytes: dict[int, bytes] = {}
        self.reads = 0

    def allocate(self, nbytes: int) -> Memory:
        self.allocated.append(nbytes)
        self.next += 1 << 24
        return Memory(self.next)

    def open_ipc(self, handle: bytes, nbytes: int) -> Mapping:
        if len(self.mapped) == self.mappings:
            raise RuntimeError("no more")
        self.mapped.append(int(handle) + (7 << 40))
        return Mapping(self, self.mapped[-1])

    def read(self, address: int, nbytes: int) -> bytes:
        self.reads += 1
        return self.bytes.get(address, bytes(nbytes))[:nbytes]
