"""A conversation as it goes: the script's next turn behind the history with the server's replies."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypedDict

from kvferry.loadgen.workload import TextScript, TokenScript


class Reply(NamedTuple):
    text: str
    tokens: list[int]  # empty unless the server gave the ids


class Generation(NamedTuple):
    """What every request of a run asks for."""

    model: str
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool


class ReplyError(Exception):
    """The reply cannot be carried into the next turn."""


class ChatMessage(TypedDict):
    role: str
    content: str


Value = str | int | float | bool | dict[str, bool] | list[int] | list[ChatMessage]


class Dialogue(Protocol):
    """One conversation."""

    @property
    def path(self) -> str:
        """Of the API."""

    @property
    def turns(self) -> int: ...

    def request(self, turn: int) -> dict[str, Value]:
        """The body that carries the history and the script's turn."""

    def append(self, reply: Reply) -> None:
        """The server's reply to the last request. Raises ReplyError."""


def _common(generation: Generation) -> dict[str, Value]:
    body: dict[str, Value] = {
        "model": generation.model,
        "max_tokens": generation.max_tokens,
        "temperature": generation.temperature,
        "seed": generation.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if generation.ignore_eos:  # an extension: not every server knows it
        body["ignore_eos"] = True
    return body


class ChatDialogue:
    """Text, through /v1/chat/completions."""

    path = "/v1/chat/completions"

    def __init__(self, script: TextScript, generation: Generation) -> None:
        self._script = script
        self._generation = generation
        self._messages: list[ChatMessage] = [{"role": "system", "content": script.system}] if script.system else []

    @property
    def turns(self) -> int:
        return len(self._script.turns)

    def request(self, turn: int) -> dict[str, Value]:
        self._messages.append({"role": "user", "content": self._script.turns[turn]})
        return {**_common(self._generation), "messages": self._messages}

    def append(self, reply: Reply) -> None:
        self._messages.append({"role": "assistant", "content": reply.text})


class TokenDialogue:
    """Token ids, through /v1/completions: nothing is tokenised twice, so the whole history can be matched."""

    path = "/v1/completions"

    def __init__(self, script: TokenScript, generation: Generation) -> None:
        self._script = script
        self._generation = generation
        self._tokens = list(script.system)

    @property
    def turns(self) -> int:
        return len(self._script.turns)

    def request(self, turn: int) -> dict[str, Value]:
        self._tokens += self._script.turns[turn]
        return {**_common(self._generation), "prompt": self._tokens, "return_token_ids": True}

    def append(self, reply: Reply) -> None:
        if not reply.tokens:
            raise ReplyError("the server gave no token ids (return_token_ids): use the chat API with it")
        self._tokens += reply.tokens
