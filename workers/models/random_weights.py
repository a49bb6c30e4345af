"""A causal model of a given shape with random weights: what moving its pages costs is what a trained one's would.

The same shape, seed, dtype and kind of device give the same weights in every process, so a prefill and a decode worker
agree. A vocabulary of 128 makes every token a character of the byte tokenizer: a reply's text becomes its tokens again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvferry.workers.models.transformer import LoadedModel, loaded

SEED = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a Llama-like transformer. ValueError names the field, its value and the bound."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int = 128
    max_tokens: int = 131072

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value: int = getattr(self, field.name)
            if not 1 <= value <= 1 << 20:
                raise ValueError(f"shape.{field.name} is {value}; it must be 1 to {1 << 20}")
        if self.heads % self.kv_heads:
            raise ValueError(f"shape.kv_heads is {self.kv_heads}; it must divide heads = {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"shape.head_dim is {self.head_dim}; it must be even")

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))


SHAPES = {
    "tiny": ModelShape(4, 256, 8, 2, 32, 512),
    "llama-1b": ModelShape(16, 2048, 32, 8, 64, 8192),
    "llama-8b": ModelShape(32, 4096, 32, 8, 128, 14336),
    "qwen2.5-3b": ModelShape(36, 2048, 16, 2, 128, 11008),
}


def parse_shape(text: str) -> ModelShape:
    """A name of SHAPES, or `layers=32,hidden=4096,heads=32,kv_heads=8,head_dim=128,intermediate=14336`. ValueError."""
    if text in SHAPES:
        return SHAPES[text]
    known = [field.name for field in dataclasses.fields(ModelShape)]
    values: dict[str, int] = {}
    for item in text.split(","):
        name, equals, number = item.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in known:
            raise ValueError(f"shape: {item[:64]!r} is neither one of {', '.join(SHAPES)} nor {', '.join(known)}")
        try:
            values[name] = int(number)
        except ValueError:
            raise ValueError(f"shape.{name} is {number[:64]!r}; it must be a whole number") from None
    missing = [
        field.name
        for field in dataclasses.fields(ModelShape)
        if field.name not in values and field.default is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"shape lacks {', '.join(missing)}")
    return ModelShape(**values)


def random_model(shape: ModelShape, *, dtype: str, threads: int, device: str = "cpu") -> LoadedModel:
    """A model with random weights. RuntimeError when there is no such device, or no room on it."""
    torch.set_num_threads(threads)
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.max_tokens,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        network: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
        generator = torch.Generator(device=device).manual_seed(SEED)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, _deviation(name, parameter, shape), generator=generator)
    return loaded(network, f"random-llama-{shape}", f"seed-{SEED}-{torch.device(device).type}")


def _deviation(name: str, parameter: torch.Tensor, shape: ModelShape) -> float:
    """The standard deviation of a parameter's values, chosen as GPT-2 starts: what a layer adds to the residual stream
    shrinks with the number of layers, else a network is chaotic, and bfloat16's rounding decides tokens. But with
    queries and keys so wide that some tokens of a prompt count much more than others: a network that looks at all of
    them alike would not show wrong pages.

    Measured by bench/gpu/turns.py (llama-8b, bfloat16, 8,700 to 10,300 tokens), see bench/results/gpu_turns.txt: chunks
    and single steps choose tokens at most 0.034 below the best of one pass; with 16 pages of 64 tokens wrong up to
    0.28, and a tenth of them more than 0.05.
    """
    if "embed_tokens" in name:
        return 1.0
    narrow = float(parameter.shape[-1] ** -0.5)
    if "lm_head" in name:
        return 0.5 * narrow
    if "q_proj" in name or "k_proj" in name:
        return 2.0 * narrow
    return narrow * (2 * shape.layers) ** -0.5 if "o_proj" in name or "down_proj" in name else narrow
