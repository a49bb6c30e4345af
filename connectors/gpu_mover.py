"""Between an engine's blocks and the daemon's pages on the same GPU: the driver's batched copies, on a stream of their
own, ordered behind the engine's by events."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry._core import GpuCopyEngine, GpuError, GpuUnavailable
from kvferry.connectors.movers import Moment, PoolPages
from kvferry.workers.rank_pools import Memory


class GpuMover:
    """`movers.Mover`, of the engine on `device`."""

    def __init__(self, device: torch.device) -> None:
        """OSError where the driver has no such device."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        try:
            self._engine = GpuCopyEngine(index)
        except (GpuUnavailable, GpuError) as error:
            raise OSError(f"{self._device}: {error}") from error
        self._stream = torch.cuda.Stream(self._device)

    def moment(self) -> Moment:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def misfit(self, memories: Sequence[Memory]) -> str:
        where = [memory.device if isinstance(memory, torch.Tensor) else "shared memory" for memory in memories]
        if where == [self._device]:
            return ""
        return (
            f"the daemon's pool is {' and '.join(map(str, where))} as this process counts devices, and the engine's "
            f"blocks are on {self._device}: start the daemon with --device and that GPU"
        )

    def copy(self, to: NDArray[np.int64], of: NDArray[np.int64], sizes: NDArray[np.int64], after: Moment) -> None:
        assert after is not None
        if not len(sizes):
            return
        self._stream.wait_event(after)
        # However long it takes: until it is over, the copy may touch both ends.
        self._engine.copy_list_on_device(to, of, sizes, self._stream.cuda_stream).wait()

    def mask(self, pool: PoolPages, page: int, kept: NDArray[np.uint8]) -> None:
        assert isinstance(pool.memory, torch.Tensor)
        row = pool.memory[page * pool.page_bytes : (page + 1) * pool.page_bytes]
        with torch.cuda.stream(self._stream):
            row &= torch.from_numpy(kept).to(self._device)
        self._stream.synchronize()
