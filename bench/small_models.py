"""Models with random weights that vLLM for CPUs can serve."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.workers.smollm import cache_folder, converted_model, made

if TYPE_CHECKING:
    from transformers import LlamaConfig

LAYERS, HIDDEN, HEADS, KV_HEADS = 4, 512, 8, 4
IMAGE_SIZE = 56  # of a part's side, in pixels
IMAGE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
IMAGE_TOKENS += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
FEW_TOKENS = 1024
MARKS = {3: "<think>", 4: "</think>", 5: "<tool_call>", 6: "</tool_call>"}
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


def model_of_few_tokens() -> Path:
    """A Llama with random weights and SmolLM2's first 1,024 tokens, so that what is done for each of them is soon done.
    Four that stood for files are those around thoughts and tool calls."""
    return made(cache_folder() / f"random-{FEW_TOKENS}-tokens", partial(_write_model_of_few_tokens, converted_model()))


def _write_model_of_few_tokens(base: Path, folder: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(base / name, folder / name)
    (folder / "tokenizer.json").write_text(json.dumps(_first_tokens(json.loads((base / "tokenizer.json").read_text()))))
    config = _text_config(base)
    config.update({"vocab_size": FEW_TOKENS, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64})
    config.update({"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})
    torch.manual_seed(7)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def _first_tokens(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer of the first FEW_TOKENS of these."""
    names = {token["content"]: MARKS.get(token["id"], token["content"]) for token in tokenizer["added_tokens"]}
    model = tokenizer["model"]
    ids = {name: number for name, number in model["vocab"].items() if number < FEW_TOKENS}
    merges = [pair for pair in model["merges"] if "".join(pair) in ids]
    added = [
        {**token, "content": names[token["content"]], "special": token["special"] and token["id"] not in MARKS}
        for token in tokenizer["added_tokens"]
    ]
    vocab = {names.get(name, name): number for name, number in ids.items()}
    return {**tokenizer, "added_tokens": added, "model": {**model, "vocab": vocab, "merges": merges}}


def model_of_images() -> Path:
    """A small Idefics3 with random weights, one of the models for which vLLM needs no torchvision: the text model's
    shape is that of `model_of_heads`, an image has four parts and itself, each of four tokens with some around them."""
    return made(cache_folder() / "random-images", partial(_write_model_of_images, converted_model()))


def _write_model_of_images(base: Path, folder: Path) -> None:
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": IMAGE_TOKENS})
    text = _text_config(base)
    text.vocab_size = -(-len(tokenizer) // 64) * 64
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        vision_config={**vision, "image_size": IMAGE_SIZE, "patch_size": 14, "initializer_range": SPREAD},
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    torch.manual_seed(7)
    model = Idefics3ForConditionalGeneration(config).to(torch.float32)
    for weights in model.model.vision_model.embeddings.parameters():
        torch.nn.init.normal_(weights)  # what is seen must be seen in the answers
    torch.nn.init.normal_(model.model.connector.modality_projection.proj.weight)
    model.save_pretrained(folder)
    whole, part = {"longest_edge": 2 * IMAGE_SIZE}, {"longest_edge": IMAGE_SIZE}
    pixels = Idefics3ImageProcessorPil(size=whole, max_image_size=part)  # an image that is not split has no part
    template = (base / "chat_template.jinja").read_text()
    Idefics3Processor(pixels, tokenizer, image_seq_len=4, chat_template=template).save_pretrained(folder)
