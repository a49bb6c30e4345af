"""Folders of models without weights, for vLLM's --load-format dummy: shapes that need several GPUs.

python bench/model_shapes.py SHAPE BASE FOLDER --pairs 4:4 2:4 [--gpus 4] [--gpu-gib 79] [--layers N] [--tokens 43392]

SHAPE: llama-70b, qwen3-32b. BASE has a Llama's config.json and a word-level tokenizer, which gets as many words as the
shape's vocabulary. Without --layers they are as many as fit, of the model's own at most, for every pair P:D of prefill
and decode ranks: the GPU with most on it has a rank of each, or of one, their --tokens of KV and ROOM_GIB of the rest.
Prints FOLDER-LAYERS, which is made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rank_devices import devices_of

ELEMENT = 2  # bytes of bfloat16
GIB = 1 << 30
ROOM_GIB = 6.0  # of an engine's rank: activations, graphs, NCCL, contexts; its daemon's context, slots and courier


@dataclass(frozen=True, slots=True)
class ModelShape:
    architecture: str
    kind: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    rope_theta: float
    kv_heads: int = 8
    head_dim: int = 128

    def weight_bytes(self, layers: int) -> int:
        """All ranks'. Vectors and biases are left out."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        each = attention + 3 * self.hidden * self.intermediate
        return ELEMENT * (layers * each + 2 * self.hidden * self.vocabulary)

    def kv_bytes(self, layers: int) -> int:
        """A token's, of all ranks."""
        return ELEMENT * layers * 2 * self.kv_heads * self.head_dim

    def fits(self, layers: int, pair: tuple[int, int], devices: list[str], gpu_gib: float, tokens: int) -> bool:
        used: Counter[str] = Counter()
        for ranks, names in zip(pair, devices_of(devices, *pair), strict=True):
            own = (self.weight_bytes(layers) + tokens * self.kv_bytes(layers)) / ranks / GIB + ROOM_GIB
            used.update(dict.fromkeys(names, own))  # type: ignore[arg-type]
        return max(used.values()) <= gpu_gib

    def config(self, layers: int) -> dict[str, object]:
        """What of a Llama's config.json is another."""
        return {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "num_hidden_layers": layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "rope_theta": self.rope_theta,
        }


SHAPES = {
    "llama-70b": ModelShape("LlamaForCausalLM", "llama", 80, 8192, 28672, 64, 128256, 5e5),
    "qwen3-32b": ModelShape("Qwen3ForCausalLM", "qwen3", 64, 5120, 25600, 64, 151936, 1e6),
}


def make(shape: ModelShape, layers: int, base: Path, folder: Path) -> None:
    shutil.copytree(base, folder, dirs_exist_ok=True)
    config = json.loads((base / "config.json").read_text()) | shape.config(layers)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    words: dict[str, int] = tokenizer["model"]["vocab"]
    words.update({f"t{number}": number for number in range(len(words), shape.vocabulary)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def pair_of(word: str) -> tuple[int, int]:
    prefill, decode = map(int, word.split(":"))
    return prefill, decode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("base", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", nargs="+", type=pair_of, required=True, metavar="P:D")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--gpu-gib", type=float, default=79.0)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=47_800, help="of KV of each engine: 1.1 x 4 chats of 10,848")
    args = parser.parse_args()
    shape, devices = SHAPES[args.shape], [f"cuda:{number}" for number in range(args.gpus)]
    try:
        fitting = (
            layers
            for layers in range(args.layers or shape.layers, 0, -1)
            if all(shape.fits(layers, pair, devices, args.gpu_gib, args.tokens) for pair in args.pairs)
        )
        layers = args.layers or next(fitting, 0)
    except ValueError as error:
        parser.error(str(error))
    if not layers:
        parser.error(f"no layer of {args.shape} fits in {args.gpu_gib:g} GiB on {args.gpus} GPUs")
    folder = args.folder.with_name(f"{args.folder.name}-{layers}")
    make(shape, layers, args.base, folder)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
