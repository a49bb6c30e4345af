"""Orders of a front end to a worker, checked: proto/engine.proto's requests with every bound applied."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.client.requests import RequestFailed, RequestName
from kvferry.proto import common_pb2, engine_pb2
from kvferry.proto.limits import MAX_PRIORITY
from kvferry.radix.prompt_cache import PromptCache
from kvferry.workers.models.interface import Prompt
from kvferry.workers.models.sampling import Sampling

DEFAULT_DEADLINE_S = 60.0
MAX_DEADLINE_S = 3600.0
MAX_STOP_TOKENS = 1024
MAX_DAEMON_NAME_CHARS = 128


class Bounds(NamedTuple):
    max_tokens: int  # of a request, prompt + output
    vocabulary: int  # token ids are below this
    page_size: int


class PrefillOrder(NamedTuple):
    name: RequestName
    prompt: Prompt
    sampling: Sampling
    deadline_s: float
    priority: int = 0  # smaller goes first
    warmup: bool = False  # it never enters the cache
    traceparent: str = ""  # of the span that its spans belong under


class DecodeOrder(NamedTuple):
    name: RequestName
    prompt: Prompt
    sampling: Sampling
    max_new_tokens: int
    stop_tokens: frozenset[int]
    prefill: str  # name of the prefill daemon; empty: compute what is missing here
    deadline_s: float  # until the first token
    priority: int = 0  # smaller goes first
    warmup: bool = False  # it never enters the cache
    traceparent: str = ""  # of the span that its spans belong under


def prefill_order(request: engine_pb2.PrefillRequest, bounds: Bounds, prompts: PromptCache) -> PrefillOrder:
    """Raises RequestFailed (INVALID_ARGUMENT) naming field, value and bound."""
    try:
        name = RequestName.from_proto(request.name)
        sampling = Sampling.from_proto(request.sampling)
        priority = _priority(request.priority)
        tokens = _tokens(request.tokens, 1, bounds)
    except ValueError as error:
        raise RequestFailed(common_pb2.ERROR_INVALID_ARGUMENT, str(error)) from None
    return PrefillOrder(
        name, _prompt(tokens, prompts), sampling, _deadline(request.deadline_ms), priority, request.warmup
    )


def decode_order(request: engine_pb2.DecodeRequest, bounds: Bounds, prompts: PromptCache) -> DecodeOrder:
    """Raises RequestFailed (INVALID_ARGUMENT) naming field, value and bound."""
    try:
        name = RequestName.from_proto(request.name)
        sampling = Sampling.from_proto(request.sampling)
        priority = _priority(request.priority)
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1")
        if len(request.stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(f"stop_tokens has {len(request.stop_tokens)} tokens; it may have {MAX_STOP_TOKENS}")
        if len(request.prefill) > MAX_DAEMON_NAME_CHARS:
            raise ValueError(f"prefill has {len(request.prefill)} characters; it may have {MAX_DAEMON_NAME_CHARS}")
        tokens = _tokens(request.tokens, request.max_new_tokens, bounds)
    except ValueError as error:
        raise RequestFailed(common_pb2.ERROR_INVALID_ARGUMENT, str(error)) from None
    return DecodeOrder(
        name,
        _prompt(tokens, prompts),
        sampling,
        request.max_new_tokens,
        frozenset(request.stop_tokens),
        request.prefill,
        _deadline(request.deadline_ms),
        priority,
        request.warmup,
    )


def _tokens(tokens: object, new_tokens: int, bounds: Bounds) -> NDArray[np.uint32]:
    prompt = np.asarray(tokens, dtype=np.uint32)
    if len(prompt) < 1:
        raise ValueError("tokens is empty; a prompt has at least 1 token")
    if len(prompt) + new_tokens > bounds.max_tokens:
        raise ValueError(
            f"tokens has {len(prompt)} tokens and {new_tokens} may be added; together they may be {bounds.max_tokens}"
        )
    largest = int(prompt.argmax())
    if prompt[largest] >= bounds.vocabulary:
        raise ValueError(f"tokens[{largest}] is {prompt[largest]}; the vocabulary has {bounds.vocabulary} tokens")
    return prompt


def _prompt(tokens: NDArray[np.uint32], prompts: PromptCache) -> Prompt:
    digests = prompts.digests(tokens)
    return Prompt(tokens, digests.digests, digests.tail)


def _priority(value: int) -> int:
    if abs(value) > MAX_PRIORITY:
        raise ValueError(f"priority is {value}; it must be -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return value


def _deadline(milliseconds: int) -> float:
    return min(milliseconds / 1000, MAX_DEADLINE_S) if milliseconds else DEFAULT_DEADLINE_S
