"""Models with random weights that vLLM for CPUs can serve."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from kvferry.workers.smollm import cache_folder, converted_model, made

LAYERS, HIDDEN, HEADS, KV_HEADS = 4, 512, 8, 4
SPREAD = 0.08  # of the weights: two best logits are seldom near each other


def model_of_heads() -> Path:
    """A small Llama with random weights and KV heads for several ranks: SmolLM2, whose tokenizer it has, has three."""
    return made(cache_folder() / f"random-{KV_HEADS}-heads", partial(_write_model, converted_model()))


def _write_model(base: Path, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(base)
    config.update(
        {
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HIDDEN // HEADS,
            "tie_word_embeddings": False,
            "initializer_range": SPREAD,
        }
    )
    torch.manual_seed(7)
    for file in base.iterdir():
        if file.suffix not in (".safetensors", ".bin") and file.name != "config.json":
            shutil.copy(file, folder / file.name)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
