"""Random small models of several families, and what plain transformers computes with them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
)
from transformers.cache_utils import DynamicCache

from kvferry.workers.models.sampling import Sampling, sample

VOCABULARY = 211


def config_of(family: str) -> PreTrainedConfig:
    if family == "gpt2":
        return GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=32, n_layer=3, n_head=4)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    if family == "qwen2":
        return Qwen2Config(**common)
    if family in ("deepseek_v3", "deepseek_v32"):
        latents = {
            "kv_lora_rank": 12,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 2,
        }
        own = common | latents | {"num_key_value_heads": 4}
        if family == "deepseek_v3":
            return DeepseekV3Config(**own)
        return AutoConfig.for_model(family, **own, index_n_heads=2, index_head_dim=8, index_topk=24)
    assert family == "mixtral"
    return MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)


def random_model(family: str) -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # wider than the usual start: then the best token is clearly the best
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model.eval()


def plain_tokens(
    model: Any, prompt: list[int], new_tokens: int, chunk_tokens: int, sampling: Sampling | None = None
) -> list[int]:
    """One process, the dynamic cache, the prompt in chunks; greedy without `sampling`."""
    cache = DynamicCache(config=model.config)
    output: list[int] = []
    with torch.inference_mode():
        for start in range(0, len(prompt), chunk_tokens):
            chunk = torch.tensor([prompt[start : start + chunk_tokens]])
            logits = model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        while True:
            position = len(prompt) + len(output)
            last = logits[0, -1]
            output.append(int(last.argmax()) if sampling is None else sample(last, sampling, position))
            if len(output) == new_tokens:
                return output
            logits = model(input_ids=torch.tensor([output[-1:]]), past_key_values=cache, use_cache=True).logits
