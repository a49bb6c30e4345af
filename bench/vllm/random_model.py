"""A small Llama with random weights and several KV heads, for engines of several ranks: SmolLM2's has three.

python bench/vllm/random_model.py FOLDER      # made where it is not there
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvferry.workers.smollm import converted_model

LAYERS, HIDDEN, HEADS, KV_HEADS = 4, 512, 8, 4
SPREAD = 0.08  # of the weights: two best logits are seldom near each other


def make(folder: Path) -> Path:
    """The model's folder, with SmolLM2's tokenizer."""
    if (folder / "config.json").exists():
        return folder
    base = converted_model()
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
    folder.mkdir(parents=True, exist_ok=True)
    for file in base.iterdir():
        if file.suffix not in (".safetensors", ".bin") and file.name != "config.json":
            shutil.copy(file, folder / file.name)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
