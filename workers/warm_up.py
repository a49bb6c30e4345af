"""Short requests of a worker's own before its first real one: libraries load and buffers grow for them. They never
enter the daemon's cache."""

from __future__ import annotations

import logging
import os
import time

import numpy as np

from kvferry.client.requests import DaemonGone, RequestFailed
from kvferry.proto import common_pb2, engine_pb2
from kvferry.proto.limits import REQUEST_ID_BYTES
from kvferry.radix.prompt_cache import PromptCache
from kvferry.workers.decode import DecodeWorker
from kvferry.workers.orders import Bounds, decode_order, prefill_order
from kvferry.workers.prefill import PrefillWorker

PROMPT_TOKENS = 32
NEW_TOKENS = 8

_log = logging.getLogger(__name__)


async def warm_up(worker: PrefillWorker | DecodeWorker, bounds: Bounds, count: int) -> None:
    """Runs `count` requests, one after the other. One that fails is the last, and no reason not to serve."""
    start = time.monotonic()
    try:
        for _ in range(count):
            await _request(worker, bounds)
    except (RequestFailed, DaemonGone) as error:
        _log.warning("warm-up ended early: %s", error)
    else:
        _log.info("warmed up with %d requests in %.3f s", count, time.monotonic() - start)


async def _request(worker: PrefillWorker | DecodeWorker, bounds: Bounds) -> None:
    prompts = PromptCache(page_size=bounds.page_size)  # not the one of real prompts
    name = common_pb2.RequestName(request_id=os.urandom(REQUEST_ID_BYTES), attempt=1)
    new_tokens = max(1, min(NEW_TOKENS, bounds.max_tokens // 2))
    tokens = np.arange(min(PROMPT_TOKENS, bounds.max_tokens - new_tokens)) % bounds.vocabulary
    if isinstance(worker, PrefillWorker):
        prefill = engine_pb2.PrefillRequest(name=name, tokens=tokens, warmup=True)
        await worker.rehearse(prefill_order(prefill, bounds, prompts))
    else:
        decode = engine_pb2.DecodeRequest(name=name, tokens=tokens, max_new_tokens=new_tokens, warmup=True)
        await worker.decode(decode_order(decode, bounds, prompts), lambda reply: None)
