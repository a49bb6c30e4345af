"""Models with random weights that vLLM for CPUs can serve."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.workers.smollm import cache_folder, converted_model, made

if TYPE_CHECKING:
    from transformers import LlamaConfig

LAYERS, HIDDEN, HEADS, KV_HEADS = 4, 512, 8, 4
IMAGE = "<image>"  # the token that stands for each of an image's
SPREAD = 0.08  # of the weights: two best logits are seldom near each other


def model_of_heads() -> Path:
    """A small Llama with random weights and KV heads for several ranks: SmolLM2, whose tokenizer it has, has three."""
    return made(cache_folder() / f"random-{KV_HEADS}-heads", partial(_write_model, converted_model()))


def _write_model(base: Path, folder: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    config = _text_config(base)
    torch.manual_seed(7)
    for file in base.iterdir():
        if file.suffix not in (".safetensors", ".bin") and file.name != "config.json":
            shutil.copy(file, folder / file.name)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def _text_config(base: Path) -> LlamaConfig:
    from transformers import LlamaConfig

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
    return config


def model_of_images() -> Path:
    """A small Llava with random weights: the text model's shape is that of `model_of_heads`, an image has 16 tokens."""
    return made(cache_folder() / "random-images", partial(_write_model_of_images, converted_model()))


def _write_model_of_images(base: Path, folder: Path) -> None:
    import torch
    from transformers import (
        AutoTokenizer,
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14
    )
    text = _text_config(base)
    text.vocab_size = -(-len(tokenizer) // 64) * 64
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=image, image_seq_length=16, vision_feature_layer=-1
    )
    config.initializer_range = SPREAD
    torch.manual_seed(7)
    LlavaForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)
    size = {"height": 56, "width": 56}
    pixels = CLIPImageProcessor(size=size, crop_size=size)
    LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,
        chat_template=(base / "chat_template.jinja").read_text(),
    ).save_pretrained(folder)
