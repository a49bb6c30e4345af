"""Small models with random weights, for vLLM: those that a machine without a network can have.

python bench/gpu/models.py KIND BASE FOLDER

latent  DeepSeek V3's attention (MLA: 512 + 64 elements a token and layer), dense
v3      the same with as many layers as DeepSeek V3, 61
experts the same with 8 experts, 2 of them a token
heads   Llama with four KV heads
indexed DeepSeek V3.2's: a sparse attention's indexer beside the latents, two layers
eagle   one layer of Llama, into FOLDER, and into FOLDER-draft an EAGLE head that is that layer again, so that it
        proposes what the model says where it has the same KV
eagle3  the same with an EAGLE3 head
mtp     one layer of DeepSeek V3's, and its multi-token prediction module, which is that layer again

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
Weights = dict[str, torch.Tensor]
QUERY_RANK = 256
INDEX = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}
AUX_LAYERS = {"eagle_aux_hidden_state_layer_ids": [0, 1]}  # vLLM's runner V2 looks beside eagle_config, V1 in it
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": AUX_LAYERS} | AUX_LAYERS
TOLD_AS: dict[str, dict[str, object]] = {
    "indexed": {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], **INDEX},
    "mtp": {"num_nextn_predict_layers": 1},
}
SMALL_ROWS = 1e-3  # of embeddings that are next to nothing beside what attention adds
SPREAD = 0.08  # of the weights: two best logits are seldom near each other


def llama(base: Path, layers: int, kv_heads: int) -> PreTrainedModel:
    config = LlamaConfig.from_pretrained(base)
    config.update({"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": layers})
    config.update({"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "head_dim": HIDDEN // HEADS})
    config.update({"tie_word_embeddings": False, "initializer_range": SPREAD})
    return LlamaForCausalLM(config)


def deepseek(base: Path, layers: int, dense_layers: int) -> PreTrainedModel:
    vocabulary = AutoConfig.from_pretrained(base)
    config = DeepseekV3Config(
        vocab_size=vocabulary.vocab_size,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_id=vocabulary.eos_token_id,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=HIDDEN // 2,
        num_hidden_layers=layers,
        first_k_dense_replace=dense_layers,  # counts an MTP module, too
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=QUERY_RANK,
        max_position_embeddings=4096,
        rope_scaling=None,
        topk_method="noaux_tc",  # as vLLM reads it
        scoring_func="sigmoid",
        initializer_range=SPREAD,
    )
    return DeepseekV3ForCausalLM(config)


def eagle_head(weights: Weights) -> Weights:
    """An EAGLE head: its input is the next token's embedding and the model's hidden state, of which it takes the
    former; its layer, which has no norm before its attention, is the model's, with that norm's weights of 1."""
    layer = {name.removeprefix("model."): value for name, value in weights.items() if ".layers.0." in name}
    del layer["layers.0.input_layernorm.weight"]
    return layer | {"fc.weight": first_half(), "embed_tokens.weight": weights["model.embed_tokens.weight"]}


def eagle3_head(weights: Weights) -> Weights:
    """An EAGLE3 head: its attention has the next token's embedding beside the model's hidden states, of which it takes
    none; so its layer is the model's, but for the embedding that the model adds to what its attention says."""
    old = "model.layers.0."
    layer = {"midlayer." + name.removeprefix(old): value for name, value in weights.items() if name.startswith(old)}
    for name in ("q_proj", "k_proj", "v_proj"):
        matrix = layer[key := f"midlayer.self_attn.{name}.weight"]
        layer[key] = torch.cat((matrix, torch.zeros_like(matrix)), dim=1)
    layer["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN)
    layer["fc.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
    layer["norm.weight"], layer["lm_head.weight"] = weights["model.norm.weight"], weights["lm_head.weight"]
    return layer | {"embed_tokens.weight": weights["model.embed_tokens.weight"]}


def mtp_module(weights: Weights) -> Weights:
    """DeepSeek's module behind one layer, which it is again: of its input it takes the next token's embedding."""
    ours, last = "model.layers.0.", "model.layers.1."
    layer = {last + name.removeprefix(ours): value for name, value in weights.items() if name.startswith(ours)}
    layer |= {f"{last}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm")}
    layer[last + "eh_proj.weight"] = first_half()
    layer[last + "embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    layer[last + "shared_head.norm.weight"] = weights["model.norm.weight"]
    return layer | {last + "shared_head.head.weight": weights["lm_head.weight"]}


def first_half() -> torch.Tensor:
    """A projection that takes the first of two hidden states."""
    return torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), dim=1)


def indexers(layers: int) -> Weights:
    """An indexer's weights in each layer."""
    heads, width = INDEX["index_n_heads"], INDEX["index_head_dim"]
    shapes = {"wq_b": (heads * width, QUERY_RANK), "wk": (width, HIDDEN), "weights_proj": (heads, HIDDEN)}
    found: Weights = {}
    for place in range(layers):
        prefix = f"model.layers.{place}.self_attn.indexer."
        found |= {f"{prefix}{name}.weight": torch.randn(shape) * SPREAD for name, shape in shapes.items()}
        found |= {f"{prefix}k_norm.weight": torch.ones(width), f"{prefix}k_norm.bias": torch.zeros(width)}
    return found


def unit_rows(model: PreTrainedModel) -> None:
    """Gives each embedding a root mean square of 1, so that a norm before the first layer changes nothing."""
    table = model.get_input_embeddings().weight
    table.div_(table.pow(2).mean(dim=1, keepdim=True).sqrt().clamp_min_(1e-6))  # that of padding is 0


def save(weights: Weights, file: Path) -> None:
    save_file({name: value.to(torch.bfloat16).contiguous().clone() for name, value in weights.items()}, file)


def tell(folder: Path, **told: object) -> None:
    """Adds to what the folder's configuration says."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16", **told}, indent=1))


def made(kind: str, base: Path) -> PreTrainedModel:
    if kind in ("latent", "v3", "experts", "indexed", "mtp"):
        layers = {"v3": 61, "mtp": 1, "indexed": 2}.get(kind, LAYERS)
        return deepseek(base, layers, 1 if kind == "experts" else layers + 1)
    return llama(base, 1 if kind in ("eagle", "eagle3") else LAYERS, 4)


def write(kind: str, base: Path, folder: Path) -> None:
    model = made(kind, base)
    if kind in ("eagle", "eagle3", "mtp"):
        unit_rows(model)
    if kind == "eagle3":
        model.get_input_embeddings().weight.mul_(SMALL_ROWS)
        model.config.rms_norm_eps = SMALL_ROWS**4
    weights: Weights = model.state_dict()
    if kind in ("eagle", "eagle3"):
        draft = folder.with_name(folder.name + "-draft")
        draft.mkdir(exist_ok=True)
        save((eagle_head if kind == "eagle" else eagle3_head)(weights), draft / "model.safetensors")
        model.config.save_pretrained(draft)
        tell(draft, **(EAGLE3 | {"draft_vocab_size": model.config.vocab_size} if kind == "eagle3" else {}))
    if kind in ("mtp", "indexed"):  # vLLM takes the weights of all files
        more = mtp_module(weights) if kind == "mtp" else indexers(model.config.num_hidden_layers)
        save(more, folder / "more.safetensors")
    model.to(torch.bfloat16).save_pretrained(folder)
    tell(folder, **TOLD_AS.get(kind, {}))
    print(json.dumps({"kind": kind, "parameters": sum(each.numel() for each in weights.values())}))


def main() -> None:
    kind, base, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(7)
    folder.mkdir(parents=True, exist_ok=True)
    for file in base.iterdir():
        if file.suffix not in (".safetensors", ".bin", ".xz") and file.name != "config.json":
            shutil.copy(file, folder / file.name)
    with torch.no_grad():
        write(kind, base, folder)


if __name__ == "__main__":
    main()
