"""vLLM's server with Model Runner V2 on CPUs: its Triton kernels are interpreted, which is slow and right. For tests of
what only that runner does. Grammars and top-p, whose kernels cannot be interpreted, are computed by torch.

python bench/vllm/programs/v2_on_cpu.py --model ...
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
from serve import name_as_vllm, run_api_server

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import torch
import triton.language as tl
from triton.backends import backends
from triton.language.extra import libdevice

name_as_vllm()
backends["cpu"] = SimpleNamespace(driver=None)  # vLLM asks for no more than the name

_best = np.nanargmax


def _best_or_first(values: Any, *args: Any, **kwargs: Any) -> Any:
    """The first place where nothing is a number, as on GPUs: a step of the warm-up computes from what nobody wrote."""
    try:
        return _best(values, *args, **kwargs)
    except ValueError:
        return np.argmax(values, *args, **kwargs)


np.nanargmax = _best_or_first
libdevice.log1p = lambda value: tl.log(value + 1.0)  # CUDA's own is not there; the same noise for all is enough


def _apply_bitmask(worker: Any, logits: Any, batch: Any, names: list[str], bitmask: np.ndarray) -> None:
    places = {name: place for place, name in enumerate(batch.req_ids)}
    ends = batch.cu_num_logits_np.tolist()
    rows = [row for name in names for row in range(ends[places[name]], ends[places[name] + 1])]
    allowed = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    if rows:
        logits[rows] = logits[rows].masked_fill(torch.from_numpy(allowed == 0), -torch.inf)


def _compute_by_torch() -> None:
    import vllm.v1.worker.cpu.shm  # noqa: F401  # before all else of the worker
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    topk_topp_sampler.HAS_TRITON = False
    StructuredOutputsWorker.apply_grammar_bitmask = _apply_bitmask


_compute_by_torch()

if __name__ == "__main__":
    run_api_server()
