"""kvferry's scheduler over blocks that are all held, beside vLLM's own: prompts that have come wait for nobody, every
request ends, and what is told of it is the same. vLLM's schedulers and block managers are real; no model computes.

PYTHONPATH=bench/vllm build/vllm-venv/bin/python bench/vllm/scheduling.py
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.connectors.vllm.scheduler import KVFerryScheduler

BLOCK, FIRST, OTHERS = 16, 7, 9
STEPS = 400
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


class LoadsAll(KVConnectorBase_V1):  # type: ignore[misc]
    """Every prompt comes from outside, later."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        external = request.num_prompt_tokens - num_computed_tokens
        return external, external > 0 and request.num_preemptions == 0

    def update_state_after_alloc(self, *told: Any) -> None: ...
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, *told: Any, **more: Any) -> None: ...
    def wait_for_layer_load(self, *told: Any) -> None: ...
    def save_kv_layer(self, *told: Any, **more: Any) -> None: ...
    def wait_for_save(self) -> None: ...


@dataclass
class Tokens:
    """In the place of kvferry's connector: the first tokens of the prompts that have just come."""

    come: list[Request] = field(default_factory=list)
    begun: int = 0

    def take_first_tokens(self) -> list[tuple[Request, int]]:
        come, self.come = self.come, []
        return [(request, FIRST) for request in come]

    def count_first_token(self) -> None:
        self.begun += 1


@dataclass(frozen=True)
class First:
    """What is told with the first token of a reply."""

    stats: object  # of its prompt
    late: bool  # it was scheduled behind the time of its token


@dataclass
class Outcome:
    ended: int = 0
    steps: int = 0
    begun: int = 0
    first: dict[str, First] = field(default_factory=dict)  # by request


def scheduler(folder: Path, blocks: int, asynchronous: bool) -> KVFerryScheduler:
    transfer = KVTransferConfig(
        kv_connector="LoadsAll",
        kv_connector_module_path="scheduling",
        kv_role="kv_consumer",
        kv_load_failure_policy="recompute",
    )
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=64,
        block_size=BLOCK,
        load_format="dummy",
        enforce_eager=True,
        kv_transfer_config=transfer,
        async_scheduling=asynchronous,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
    grammars = StructuredOutputManager(config)
    words = {"vllm_config": config, "kv_cache_config": caches, "structured_output_manager": grammars}
    return KVFerryScheduler(**words, block_size=BLOCK, hash_block_size=BLOCK, log_stats=True)


def run(made: KVFerryScheduler, prompts: list[int], output: int, *, first_tokens: Tokens | None) -> Outcome:
    """Some requests to their ends, or STEPS steps. Their prompts come together."""
    if first_tokens is not None:
        made._kvferry, made._forces = first_tokens, True
    hasher, outcome, come = get_request_block_hasher(BLOCK, sha256), Outcome(), set[str]()
    requests = [
        Request(
            request_id=f"r{number}",
            prompt_token_ids=[100 + number] + [5] * (tokens - 1),
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
            pooling_params=None,
            block_hasher=hasher,
        )
        for number, tokens in enumerate(prompts)
    ]
    for request in requests:
        made.add_request(request)
    while made.requests and outcome.steps < STEPS:
        outcome.steps += 1
        step = made.schedule()
        waiting = [each for each in requests if each.status.name == "WAITING_FOR_REMOTE_KVS"]
        now = [each for each in waiting if each.request_id not in come] if outcome.steps > 2 else []
        come |= {each.request_id for each in now}
        if first_tokens is not None:
            first_tokens.come = now
        ids = list(step.num_scheduled_tokens)
        computed = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: place for place, name in enumerate(ids)},
            sampled_token_ids=[[OTHERS] for _ in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[None] * len(ids),
            kv_connector_output=KVConnectorOutput(finished_recving={each.request_id for each in now}),
        )
        for told in made.update_from_output(step, computed).values():
            for each in told.outputs:
                if each.request_id not in outcome.first:
                    scheduled = [event.timestamp for event in each.events or () if event.type.name == "SCHEDULED"]
                    late = bool(scheduled) and scheduled[0] > told.timestamp
                    outcome.first[each.request_id] = First(each.prefill_stats, late)
                outcome.ended += each.finish_reason is not None
    outcome.begun = first_tokens.begun if first_tokens is not None else 0
    return outcome


CASES = {
    "10 prompts that end with a block, and fill memory": ([160] * 10, 20, 101, 0),
    "the same, with room": ([160] * 10, 20, 400, 10),
    "two that end with a block among others": ([160, *[157] * 8, 160], 20, 101, 8),
    "one token each": ([160, 157] * 3, 1, 101, 6),
}
"""Tokens of the prompts, of each reply, blocks, and how many replies begin with a first token."""


def main() -> int:
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    wrong = 0
    print(f"vLLM {vllm.__version__}")
    print(f"{'':72}{'ended':>7}{'steps':>7}{'begun':>7}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for name, (prompts, output, blocks, begun) in CASES.items():
            for asynchronous in (False, True):
                own, ours = (
                    run(scheduler(Path(folder), blocks, asynchronous), prompts, output, first_tokens=tokens)
                    for tokens in (None, Tokens())
                )
                for who, each in (("vLLM", own), ("kvferry", ours)):
                    kind = f"{name}, {'async' if asynchronous else 'sync'}, {who}"
                    print(f"{kind:72}{each.ended:>7}{each.steps:>7}{each.begun:>7}")
                    wrong += each.ended != len(prompts)
                wrong += ours.begun != begun
                wrong += sum(not same(own.first[request], told) for request, told in ours.first.items())
    print("as it should be" if not wrong else f"{wrong} WRONG")
    return 1 if wrong else 0


def same(own: First, ours: First) -> bool:
    """Whether the statistics of the prompt are the same, and of times in their order."""
    return not ours.late and ours.stats is not None and ours.stats == own.stats


if __name__ == "__main__":
    sys.exit(main())
