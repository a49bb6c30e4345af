"""A prefill and a decode engine of SGLang on CPUs, each with a real daemon."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import grpc
import numpy as np
import requests
import torch.distributed as dist

from kvferry.connectors.sglang.plugin import BACKEND, register
from kvferry.daemon.cli.stack import Process, Stack, lasting_port
from kvferry.daemon.cli.stats import fetch
from tests.connectors.sglang.engine_on_cpu import HOST, Engine, new_prompt, new_request, server_args, until
from tests.connectors.sglang.shared_kv import ONE, PAGE, Rank, kv_of

__all__ = ["PAGE", "Pair", "kv_of", "new_prompt", "stats_of", "until"]


Place: TypeAlias = Callable[[str], tuple[Sequence[str], str]]


class Pair:
    """Both engines, their daemons and prefill's bootstrap server."""

    def __init__(
        self,
        stack: Stack,
        patches: ExitStack,
        *,
        prefill_tokens: int = 1024,
        decode_tokens: int = 1024,
        prefill_words: Sequence[str] = (),
        words: Sequence[str] = (),
        place: Place = lambda role: ((), HOST),
        **kwargs: Any,
    ) -> None:
        """prefill_words: more of its daemon's. words: more of both. place: a command that runs a role's daemon, and
        its host."""
        from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

        self.stack = stack
        self.daemons: dict[str, Process] = {}
        self.words: dict[str, list[str]] = {}
        self.prefixes = {role: place(role)[0] for role in ("prefill", "decode")}
        prefill, decode = (f"{place(role)[1]}:{lasting_port()}" for role in ("prefill", "decode"))
        open_wire = ("--insecure",) if place("prefill")[1] != HOST else ()
        words = (*words, *open_wire)
        self.start("prefill", "--listen", prefill, *words, *prefill_words)
        self.start("decode", "--listen", decode, "--peer", f"p={prefill}", "--host-bytes", "1MiB", *words)
        self.port = lasting_port()
        self.bootstrap = get_kv_class(TransferBackend(BACKEND), KVClassType.BOOTSTRAP_SERVER)(HOST, self.port)
        until(self._answers)
        tokens = {"prefill": prefill_tokens, "decode": decode_tokens}
        self.rooms = iter(range(1, 1 << 30))
        self.engines: dict[str, Any] = {}
        for role in ("prefill", "decode"):
            settings = {"socket": self.socket(role), "revision": "test", "deadline_seconds": 15, **kwargs}
            patches.enter_context(mock.patch.dict(os.environ, SGLANG_KVFERRY=json.dumps(settings)))
            self.engines[role] = self.engine(role, tokens[role])
        self.prefill, self.decode = self.engines["prefill"], self.engines["decode"]

    def engine(self, role: str, tokens: int) -> Any:
        return Engine(role, self.port, tokens)

    def start(self, role: str, *more: str) -> None:
        if role not in self.words:
            words = ["serve", "--role", role, "--name", role[0], "--socket", self.socket(role), "--pool", "engine"]
            self.words[role] = [*words, "--page-size", str(PAGE), "--checksums", "on", *more]
        self.daemons[role] = self.stack.start(f"{role}-daemon", self.words[role], prefix=self.prefixes[role])
        self.stack.ready(self.daemons[role])

    def socket(self, role: str) -> str:
        return f"{self.stack.folder}/{role}.sock"

    def _answers(self) -> bool:
        try:
            return requests.get(f"http://{HOST}:{self.port}/health", timeout=1).ok
        except requests.RequestException:
            return False

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.bootstrap.close()

    def is_right(self, req: Any, prompt: list[int]) -> bool:
        """Whether decode's pages have the prompt's KV."""
        got = self.decode.shared.slots(self.decode.slots(req, 0, len(prompt)))
        return np.array_equal(got, kv_of(prompt, 0, len(prompt)))

    def requests(self, tokens: Any, **more: Any) -> tuple[Any, Any]:
        """Prefill's and decode's request of one prompt."""
        room = next(self.rooms)
        return new_request(tokens, room, self.port, **more), new_request(tokens, room, self.port, **more)

    def exchange(self, tokens: Any, chunk: int = 0, **more: Any) -> tuple[Any, Any]:
        """One prompt from its beginning to its end on prefill; decode's request still has its pages."""
        theirs, ours = self.requests(tokens, **more)
        self.decode.admit(ours)
        self.prefill.bootstrap(theirs)
        self.prefill.compute(theirs, chunk)
        assert self.decode.arrived(ours), ours.finished_reason
        assert self.prefill.is_sent(theirs), theirs.finished_reason
        return theirs, ours


def _kernel(*args: Any) -> Any:
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    prefix, lengths, last, free, out, _, page = args
    alloc_extend_naive(prefix, lengths, last, free, out, page, "cpu")


def prepared(patches: ExitStack, rank: Rank = ONE, group: str = "") -> None:
    """SGLang's process groups and kernels, as far as a rank on a CPU has them. `group`: a file by which the ranks of
    one engine find each other."""
    from sglang.srt import runtime_context
    from sglang.srt.disaggregation import decode
    from sglang.srt.disaggregation.common import conn
    from sglang.srt.mem_cache.allocator import paged

    runtime_context._CONTEXT._server_args = server_args("prefill", 0, True)
    if not dist.is_initialized():
        store = dist.FileStore(group, rank.ranks) if group else dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.ranks)
    own = SimpleNamespace(attn_tp_size=rank.ranks, attn_tp_rank=rank.rank, attn_cp_size=1, attn_cp_rank=0)
    for module in (conn, decode):
        patches.enter_context(mock.patch.object(module, "get_parallel", return_value=own))
    for name, value in (("get_attention_dp_size", 1), ("get_attention_dp_rank", 0), ("get_pp_group", None)):
        patches.enter_context(mock.patch.object(conn, name, return_value=value))
    patches.enter_context(mock.patch.object(paged, "alloc_extend_kernel", {(1,): _kernel}))


def hooked() -> None:
    """kvferry's plugin, as SGLang loads it."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    register()
    HookRegistry.apply_hooks()


def stats_of(pair: Pair, role: str) -> Any:
    """The daemon's counts of its side."""
    with grpc.insecure_channel(f"unix:{pair.socket(role)}") as channel:
        return fetch(channel).sides[0]
