"""vLLM's OffloadingConnector for engines on CPUs, for which vLLM has no copies: its scheduler, cache policy and worker
are vLLM's own, blocks are copied in plain torch.

{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"spec_name":
"OffloadingInTorch", "spec_module_path": "programs.offloading_in_torch", "cpu_bytes_to_use": BYTES}}
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

logger = init_logger("vllm.offloading_in_torch")


class OffloadingInTorch(CPUOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1, "an offloaded block must be one of the engine's"
        self._worker = self._worker or Copies(kv_caches, int(self.extra_config["cpu_bytes_to_use"]))
        return self._worker


class Copies(OffloadingWorker):  # type: ignore[misc]
    """Each is over when it is asked for: a step on a CPU has ended by then."""

    def __init__(self, kv_caches: Any, nbytes: int) -> None:
        self._blocks = [each.tensor for each in kv_caches.tensors]
        count = nbytes // sum(each.shape[1] for each in self._blocks)
        self._kept = [torch.zeros((count, each.shape[1]), dtype=torch.int8) for each in self._blocks]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._blocks, src_spec, self._kept, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        logger.info("Inject KV cache of %d blocks", len(src_spec.block_ids))
        return self._copy(job_id, self._kept, src_spec, self._blocks, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def _copy(self, job_id: int, sources: Any, src_spec: Any, targets: Any, dst_spec: Any) -> bool:
        began = time.perf_counter()
        src, dst = (torch.as_tensor(spec.block_ids, dtype=torch.long) for spec in (src_spec, dst_spec))
        for source, target in zip(sources, targets, strict=True):
            target[dst] = source[src]
        nbytes = len(src) * sum(source.shape[1] for source in sources)
        self._done.append(TransferResult(job_id, True, nbytes, max(time.perf_counter() - began, 1e-9)))
        return True
