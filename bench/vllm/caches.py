"""Kinds of KV caches between vLLM engines that are all in this process: greedy tokens of a pair joined by kvferry's
daemons against one engine's, and what was moved. Three engines of a small model are up in a minute or two; several
ranks (--ranks) are processes beside it.

VLLM_PYTHON's interpreter runs it:  python bench/vllm/caches.py MODELS_FOLDER KIND...
KIND: a folder of bench/gpu/models.py in MODELS_FOLDER, and behind a "+" the type of its KV: heads+fp8_e5m2.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}

from chat import Reply, Token, compared
from cluster import PROGRAMS, Cluster, Log, Spec

sys.path.append(str(PROGRAMS))
import latents_in_torch  # noqa: F401  before vLLM's engine, whose CPU build has none
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state

from kvferry.connectors.params import new_name
from kvferry.transfer.protocol.slots import HEADER_BYTES

BLOCK = 64
KV_BYTES = 256 << 20
TOKENS = 768  # of a request
FIRST, MORE = 200, 70  # tokens of a chat's first message, and of each other
DRAFTS = {"eagle": "eagle", "eagle3": "eagle3", "mtp": "mtp"}


@dataclass(frozen=True, slots=True)
class Case:
    models: Path
    kind: str
    cache_dtype: str
    ranks: dict[str, int]
    chats: int
    turns: int
    new_tokens: int
    decode_blocks: int
    pool_bytes: str

    def engine(self, name: str, transfer: dict[str, object] | None) -> Any:
        ranks = self.ranks.get(name, 1)
        method = DRAFTS.get(self.kind)
        folder = self.models / self.kind
        draft = {"method": method, "num_speculative_tokens": 1 if method == "mtp" else 3}
        if method in ("eagle", "eagle3"):
            draft["model"] = str(folder.with_name(folder.name + "-draft"))
        blocks = self.decode_blocks if name == "decode" and transfer else 0
        return LLM(
            str(folder), dtype="float32", enforce_eager=True, block_size=BLOCK, max_model_len=TOKENS, max_num_seqs=8,
            max_num_batched_tokens=TOKENS, skip_tokenizer_init=True, disable_log_stats=False, seed=0,
            kv_cache_memory_bytes=KV_BYTES, kv_cache_dtype=self.cache_dtype, tensor_parallel_size=ranks,
            distributed_executor_backend="uni" if ranks == 1 else "mp", tokenizer_mode="hf",
            speculative_config=draft if method else None, num_gpu_blocks_override=blocks or None,
            kv_transfer_config=transfer,
        )  # fmt: skip

    def messages(self, chat: int, turn: int) -> list[int]:
        """Tokens that no other message has in this order."""
        first, count = 1000 * (10 * chat + turn + 1), FIRST if turn == 0 else MORE
        return [first + 7 * place % 991 for place in range(count)]


class OneOfSeveral:
    """An engine of this process. vLLM has the connector of a process's one worker in a global."""

    def __init__(self, case: Case, name: str, transfer: dict[str, object] | None) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        self.engine = case.engine(name, transfer)
        self._connector = kv_transfer_state._KV_CONNECTOR_AGENT

    def answer(self, prompt: list[int], tokens: int, told: dict[str, object]) -> Reply:
        kv_transfer_state._KV_CONNECTOR_AGENT = self._connector
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2, extra_args=told)
        (found,) = self.engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        (output,) = found.outputs
        ranked = [sorted((each.logprob for each in place.values()), reverse=True) for place in output.logprobs]
        chosen = zip(output.token_ids, ranked, strict=True)
        return Reply(tokens=[Token(str(token), best[0], best[1]) for token, best in chosen], prompt_tokens=len(prompt))

    def close(self) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = self._connector
        self.engine.llm_engine.engine_core.shutdown()


class Engines:
    """A pair, joined by daemons, or one engine alone."""

    def __init__(self, case: Case, cluster: Cluster | None) -> None:
        self._case = case
        self._prefill = OneOfSeveral(case, "prefill", cluster.transfer_of("prefill")) if cluster else None
        self._decode = OneOfSeveral(case, "decode", cluster.transfer_of("decode") if cluster else None)

    def ask(self, prompt: list[int]) -> Reply:
        told: dict[str, object] = {}
        if self._prefill is not None:
            name = new_name().request_id.hex()
            self._prefill.answer(prompt, 1, _params(do_remote_decode=True, kvferry_request=name))
            told = _params(do_remote_prefill=True, kvferry_request=name, kvferry_prefill="prefill")
        return self._decode.answer(prompt, self._case.new_tokens, told)

    def accepted(self) -> str:
        """How many of a draft model's tokens were taken; empty where it has none."""
        counts = {metric.name: getattr(metric, "value", 0) for metric in self._decode.engine.get_metrics()}
        taken, proposed = (counts.get(f"vllm:spec_decode_num_{name}_tokens", 0) for name in ("accepted", "draft"))
        return f"; accepted {taken} of {proposed} draft tokens" if proposed else ""

    def close(self) -> None:
        for engine in filter(None, (self._prefill, self._decode)):
            engine.close()


def _params(**params: object) -> dict[str, object]:
    return {"kv_transfer_params": params}


def chats(case: Case, engines: Engines, said: list[list[Reply]] | None = None) -> list[list[Reply]]:
    """Turn by turn, all chats; `said`: the answers that prompts go on with, else the engines' own."""
    found: list[list[Reply]] = [[] for _ in range(case.chats)]
    prompts: list[list[int]] = [[] for _ in range(case.chats)]
    for turn in range(case.turns):
        for chat, prompt in enumerate(prompts):
            prompt += case.messages(chat, turn)
            found[chat].append(engines.ask(prompt))
            prompt += [int(token.text) for token in (said or found)[chat][turn].tokens]
    return found


def run(case: Case, log: Log) -> int:
    alone = Engines(case, None)
    want = chats(case, alone)
    again = chats(case, alone, want)
    log.add(f"{case.kind}, KV {case.cache_dtype}: one engine, asked twice: {compared(want, again)}{alone.accepted()}")
    alone.close()
    spec = Spec(page_size=BLOCK, ranks=case.ranks, pool_bytes=case.pool_bytes, extra={"deadline_seconds": 120.0})
    with Cluster(spec) as cluster:
        cluster.start_daemons()
        pair = Engines(case, cluster)
        got = chats(case, pair, want)
        comparison, drafted = compared(want, got, again), pair.accepted()
        stats = cluster.stats("decode")
        pair.close()
    wire = stats.transfers
    pages = wire.delta_pages
    sent = (wire.wire_bytes - HEADER_BYTES * wire.parts) / max(1, pages) / BLOCK / case.ranks.get("decode", 1)
    log.add(
        f"{case.kind}, pair {case.ranks or '1:1'}: {comparison}; received {pages} pages, {sent:,.2f} bytes a token and "
        f"rank, {stats.host.page_bytes / BLOCK:,.2f} in the host tier; the daemon held {stats.requests.hit_tokens} "
        f"tokens, {stats.tiers.restored_pages} pages restored{drafted}",
        *comparison.told,
    )
    return len(comparison.wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("kinds", nargs="+", metavar="KIND")
    parser.add_argument("--ranks", default="1:1", metavar="P:D")
    parser.add_argument("--chats", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=20)
    parser.add_argument("--decode-blocks", type=int, default=14, help="few, so that chats put each other out")
    parser.add_argument("--pool-bytes", default="512MiB", help="of each daemon; few, so that pages are spilled")
    parser.add_argument("--output", type=Path, metavar="FILE")
    args = parser.parse_args()
    log, wrong = Log(args.output), 0
    prefill, decode = map(int, args.ranks.split(":"))
    ranks = {} if args.ranks == "1:1" else {"alone": 1, "prefill": prefill, "decode": decode}
    load = args.chats, args.turns, args.new_tokens
    case = Case(args.models, "", "auto", ranks, *load, args.decode_blocks, args.pool_bytes)
    for told in args.kinds:
        kind, _, cache_dtype = told.partition("+")
        wrong += run(replace(case, kind=kind, cache_dtype=cache_dtype or "auto"), log)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
