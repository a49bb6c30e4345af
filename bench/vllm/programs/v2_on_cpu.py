"""vLLM's server with Model Runner V2 on CPUs: its Triton kernels are interpreted, which is slow and right. For tests of
what only that runner does, but for grammars and top-p, whose kernels cannot be interpreted.

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

if __name__ == "__main__":
    run_api_server()
