"""Memory on a GPU as another process maps it, by CUDA IPC: a daemon's, mapped here, and one's own for a daemon."""

from __future__ import annotations

from kvferry._core import GpuCopyEngine, GpuError, GpuMapping, GpuUnavailable, gpu_device_ordinal


class IpcMemory:
    """The first `nbytes` of an allocation, mapped until `close`. `torch.as_tensor(memory, device=...)` is a tensor over
    it."""

    def __init__(self, device_uuid: bytes, handle: bytes, nbytes: int) -> None:
        """OSError where this process does not see the device, or cannot map the memory."""
        try:
            self.device = gpu_device_ordinal(device_uuid)
            """Its number in this process."""
            self._mapping: GpuMapping = GpuCopyEngine(self.device).open_ipc(handle, nbytes)
        except (GpuUnavailable, GpuError, ValueError) as error:
            raise OSError(f"memory on a GPU cannot be mapped: {error}") from error

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return self._mapping.__cuda_array_interface__

    def close(self) -> None:
        """Unmaps the memory: nobody may use it any more. Idempotent."""
        self._mapping.close()


class Exporter:
    """Names memory of this process on one device, by number, for others."""

    def __init__(self, device: int) -> None:
        """OSError where there is no such device."""
        try:
            self._engine = GpuCopyEngine(device)
        except (GpuUnavailable, GpuError) as error:
            raise OSError(f"cuda:{device}: {error}") from error
        self.device_uuid = self._engine.device_uuid()

    def export(self, address: int, nbytes: int) -> tuple[bytes, int]:
        """The handle of the allocation that these bytes lie in, and their offset in it. OSError: it has none, or they
        are not in one."""
        try:
            return self._engine.export_memory(address, nbytes)
        except (GpuError, ValueError) as error:
            raise OSError(f"memory on a GPU cannot be shared: {error}") from error
