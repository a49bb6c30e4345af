"""Dynamo's vLLM worker in the place of vLLM's API server: the same arguments, of which --port is where it tells its
health and metrics. Its half of a request is that of its connector's role. DYNAMO_SITE: the folder with ai-dynamo.

python bench/vllm/programs/dynamo_worker.py --port PORT --model ...
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from serve import name_as_vllm

HALVES = {"kv_producer": "prefill", "kv_consumer": "decode"}
IMAGES = "transformers.models.qwen2_vl.image_processing"


def worker_words(words: list[str]) -> list[str]:
    """vLLM's arguments as the worker has them; the port goes to the environment."""
    kept, given = [], iter(words)
    for word in given:
        if word in ("--host", "--port"):
            os.environ["DYN_SYSTEM_" + word[2:].upper()] = next(given)
        elif word == "--kv-transfer-config":
            transfer = next(given)
            kept += [word, transfer, "--disaggregation-mode", HALVES[json.loads(transfer)["kv_role"]]]
        elif word != "--disable-uvicorn-access-log":
            kept.append(word)
    return kept


def main() -> None:
    sys.path.append(os.environ["DYNAMO_SITE"])
    sys.argv[1:] = worker_words(sys.argv[1:])
    name_as_vllm()
    # The worker imports a size of images from the module that needs torchvision, which PyPI has for CUDA alone.
    sys.modules[IMAGES + "_qwen2_vl"] = importlib.import_module(IMAGES + "_pil_qwen2_vl")
    worker = importlib.import_module("dynamo.vllm.main")
    worker.main()


if __name__ == "__main__":
    main()
