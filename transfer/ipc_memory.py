"""A daemon's memory on a GPU as another process maps it, by CUDA IPC."""

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
        """Nobody may use the memory any more. Idempotent."""
        self._mapping.close()
