"""`vllm serve` for vLLM's CPU build, whose distribution has another name than the `vllm` command looks for.

python bench/vllm/serve.py serve ...
"""

from __future__ import annotations

from distribution import name_as_vllm
from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    name_as_vllm()
    main()
