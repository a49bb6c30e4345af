"""The OpenAI API's requests and replies, as far as the front end speaks it.

Extensions, named as vLLM names them: `top_k`, `ignore_eos`, `min_tokens` (with `ignore_eos`), `priority` (-1000 to
1000, default 0; smaller is handled earlier), `return_token_ids` (gives `prompt_token_ids` and `choices[].token_ids`,
and the object `kvferry`). Our own: `kvferry_warmup` (default false; true: the request is computed and answered, but
finds nothing in the cache and leaves nothing there). Parameters that are not supported are accepted where their value
asks for nothing, and refused by name where it does.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from kvferry.front.errors import ApiError, from_validation, invalid
from kvferry.proto.limits import MAX_PRIORITY

MAX_MESSAGES = 100_000
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_SEED = 2**64 - 1
MIN_SEED = -(2**63)

_IGNORED = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    )
)
# Values of unsupported parameters that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
ELSEWHERE = "the front end before vLLM servers (kvferry front --vllm-decode) passes it on"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, never done
    continuous_usage_stats: bool = False  # accepted, never done


class _GenerationRequest(_Strict):
    """The fields that both kinds of request have."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, le=2**31 - 1)
    seed: int | None = Field(default=None, ge=MIN_SEED, le=MAX_SEED)
    stop: list[str] = Field(default_factory=list, max_length=MAX_STOPS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    return_token_ids: bool = False
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    kvferry_warmup: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stops_have_a_length(cls, value: list[str]) -> list[str]:
        for i, stop in enumerate(value):
            if not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise ValueError(f"entry {i} must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> _GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only with stream: true")
        if self.min_tokens and not self.ignore_eos:
            raise ValueError(f"min_tokens is supported only with ignore_eos: true or as 0, got {self.min_tokens}")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def output_bound(self) -> int | None:
        """The largest number of new tokens that is asked for."""
        return self.max_tokens


class Message(BaseModel):
    # Other keys of a message (name, refusal, tool_calls: null, ...) come back from clients and say nothing to a
    # template.
    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str

    @model_validator(mode="before")
    @classmethod
    def _no_content_is_empty(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("role") == "assistant" and value.get("content") is None:
            if value.get("tool_calls"):
                raise ValueError("tool_calls is not supported")
            return {**value, "content": ""}
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _text_parts_are_text(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        texts = []
        for i, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f'part {i} must be {{"type": "text", "text": ...}}: only text is supported')
            texts.append(part["text"])
        return "".join(texts)


class ChatRequest(_GenerationRequest):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def output_bound(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(_GenerationRequest):
    prompt: str | list[int]

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: object) -> object:
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            if len(value) != 1:
                raise ValueError(f"one prompt a request is supported, got a list of {len(value)}")
            value = value[0]
        if isinstance(value, list):
            if not value:
                raise ValueError("a list of token ids must have at least 1, got 0")
            for i, token in enumerate(value):
                if type(token) is not int:
                    raise ValueError(f"entry {i} must be a token id, got {token!r:.40}")
        elif not isinstance(value, str):
            raise ValueError(f"must be a string or a list of token ids, got {type(value).__name__}")
        return value


Request = TypeVar("Request", ChatRequest, CompletionRequest)


def parse_request(kind: type[Request], body: bytes) -> Request:
    """The request in a body. Raises ApiError that names the field, its value and its bound."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(None, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid(None, f"the body must be a JSON object, got {type(fields).__name__}")
    try:
        return kind.model_validate(_without_neutral(fields))
    except ValidationError as error:
        raise from_validation(error) from None


def _without_neutral(fields: dict[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, value in fields.items():
        if value is None or name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            kept[name] = value
        elif value not in _NEUTRAL[name]:
            raise _unsupported(name, value)
    return kept


def _unsupported(name: str, value: object) -> ApiError:
    only = " or ".join(repr(neutral) for neutral in _NEUTRAL[name])
    message = f"{name}: only {only} is supported, got {value!r:.80}; {ELSEWHERE}"
    return invalid(name, message, code="unsupported_value")


# Replies. They are dumped with exclude_unset: a field that is not given is not sent.


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TransferReport(BaseModel):
    """The object `kvferry`, sent when token ids are asked for: the way in which a request was served."""

    request_id: str
    decode: str  # address of the decode server
    prefill: str | None  # of the prefill server; null: the decode server computed what was missing
    matched_tokens: int
    delta_pages: int
    delta_bytes: int
    admit_to_ready_us: int
    host_tokens: int  # of the matched ones, those that came back from the host tier
    spliced_tokens: int
    lost_tokens: int


class _Reply(BaseModel):
    id: str
    object: str
    created: int
    model: str
    prompt_token_ids: list[int] = Field(default_factory=list)
    kvferry: TransferReport | None = None


class ChatMessageReply(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: str | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessageReply
    logprobs: None
    finish_reason: str
    token_ids: list[int] = Field(default_factory=list)


class ChatReply(_Reply):
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: str | None
    token_ids: list[int] = Field(default_factory=list)


class ChatChunk(_Reply):
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(BaseModel):
    """A choice of a whole reply and of a chunk."""

    index: int
    text: str
    logprobs: None
    finish_reason: str | None
    token_ids: list[int] = Field(default_factory=list)


class CompletionReply(_Reply):
    """A whole reply, or a chunk of one."""

    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvferry"
    max_model_len: int
    vocab_size: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
