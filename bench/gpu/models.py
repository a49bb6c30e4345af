"""Small models with random weights, for vLLM: those that a machine without a network can have.

python bench/gpu/models.py KIND BASE FOLDER

latent  DeepSeek V3's attention (MLA: 512 + 64 elements a token and layer), dense
experts the same with 8 experts, 2 of them a token
heads   Llama with four KV heads
eagle   one layer of Llama, into FOLDER, and into FOLDER-draft an EAGLE head that is that layer again, so that it
        proposes what the model says where it has the same KV

BASE has the tokenizer, and a config.json of Llama's whose vocabulary is taken.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

HIDDEN, LAYERS, HEADS = 512, 4, 8
SPREAD = 0.08  # of the weights: two best logits are seldom near each other


def llama(base: Path, layers: int, kv_heads: int) -> PreTrainedModel:
    config = LlamaConfig.from_pretrained(base)
    config.update({"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": layers})
    config.update({"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "head_dim": HIDDEN // HEADS})
    config.update({"tie_word_embeddings": False, "initializer_range": SPREAD})
    return LlamaForCausalLM(config)


def deepseek(base: Path, dense_layers: int) -> PreTrainedModel:
    vocabulary = AutoConfig.from_pretrained(base)
    config = DeepseekV3Config(
        vocab_size=vocabulary.vocab_size,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_id=vocabulary.eos_token_id,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=HIDDEN // 2,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=dense_layers,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=256,
        max_position_embeddings=4096,
        rope_scaling=None,
        topk_method="noaux_tc",  # as vLLM reads it
        scoring_func="sigmoid",
        initializer_range=SPREAD,
    )
    return DeepseekV3ForCausalLM(config)


def save_draft(model: PreTrainedModel, folder: Path) -> None:
    """An EAGLE head: its input is the next token's embedding and the model's hidden state, of which it takes the
    former; its layer, which has no norm before its attention, is the model's, with that norm's weights of 1."""
    folder.mkdir(exist_ok=True)
    weights = model.state_dict()
    layer = {name.removeprefix("model."): value for name, value in weights.items() if ".layers.0." in name}
    del layer["layers.0.input_layernorm.weight"]
    layer["fc.weight"] = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), dim=1)
    layer["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    save_file({name: value.clone().contiguous() for name, value in layer.items()}, folder / "model.safetensors")
    model.config.save_pretrained(folder)


def unit_rows(model: PreTrainedModel) -> None:
    """Gives each embedding a root mean square of 1, so that a norm before the first layer changes nothing."""
    table = model.get_input_embeddings().weight
    table.div_(table.pow(2).mean(dim=1, keepdim=True).sqrt().clamp_min_(1e-6))  # that of padding is 0


def main() -> None:
    kind, base, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(7)
    folder.mkdir(parents=True, exist_ok=True)
    for file in base.iterdir():
        if file.suffix not in (".safetensors", ".bin", ".xz") and file.name != "config.json":
            shutil.copy(file, folder / file.name)
    with torch.no_grad():
        if kind in ("latent", "experts"):
            model = deepseek(base, LAYERS if kind == "latent" else 1)
        else:
            model = llama(base, 1 if kind == "eagle" else LAYERS, 4)
        if kind == "eagle":
            unit_rows(model)
            save_draft(model, folder.with_name(folder.name + "-draft"))
    model.to(torch.bfloat16).save_pretrained(folder)
    print(json.dumps({"kind": kind, "parameters": sum(each.numel() for each in model.parameters())}))


if __name__ == "__main__":
    main()
