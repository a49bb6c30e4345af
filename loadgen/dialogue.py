"""A conversation as it goes: the script's next turn behind the history with the server's replies."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypedDict

from kvferry.loadgen.scripts import TextScript, TokenScript, token_run


class Reply(NamedTuple):
    text: str
    tokens: list[int]  # empty unless the server gave the ids


@dataclass(frozen=True, slots=True)
class Generation:
    """The fields that every request of a run has."""

    model: str
    temperature: float
    seed: int
    ignore_eos: bool
    extra: dict[str, object] = field(default_factory=dict)  # more fields of the body


class ReplyError(Exception):
    """The reply cannot be carried into the next turn."""


class DialogueMessage(TypedDict):
    role: str
    content: str


class Dialogue(Protocol):
    """One conversation."""

    @property
    def path(self) -> str:
        """The path of the API."""

    @property
    def turns(self) -> int: ...

    def think_s(self, turn: int) -> float:
        """Seconds from the reply before to this turn."""

    def request(self, turn: int) -> bytes:
        """The JSON body that carries the history and the script's turn."""

    def append(self, reply: Reply) -> None:
        """The server's reply to the last request, when another turn follows. Raises ReplyError."""


def _common(generation: Generation, max_tokens: int) -> dict[str, object]:
    body: dict[str, object] = {
        "model": generation.model,
        "max_tokens": max_tokens,
        "temperature": generation.temperature,
        "seed": generation.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if generation.ignore_eos:  # an extension: not every server knows it
        body["ignore_eos"] = True
    return body | generation.extra


class ChatDialogue:
    """A conversation in text, through /v1/chat/completions."""

    path = "/v1/chat/completions"

    def __init__(self, script: TextScript, generation: Generation) -> None:
        self._script = script
        self._generation = generation
        self._messages: list[DialogueMessage] = [{"role": "system", "content": script.system}] if script.system else []

    @property
    def turns(self) -> int:
        return len(self._script.turns)

    def think_s(self, turn: int) -> float:
        return self._script.turns[turn].think_s

    def request(self, turn: int) -> bytes:
        self._messages.append({"role": "user", "content": self._script.turns[turn].text})
        body = _common(self._generation, self._script.turns[turn].max_tokens) | {"messages": self._messages}
        return json.dumps(body).encode()

    def append(self, reply: Reply) -> None:
        self._messages.append({"role": "assistant", "content": reply.text})


class TokenDialogue:
    """A conversation in token ids, through /v1/completions: nothing is tokenised twice, so the whole history can be
    matched."""

    path = "/v1/completions"

    def __init__(self, script: TokenScript, generation: Generation) -> None:
        self._script = script
        self._generation = generation
        self._history: list[bytes] = []

    @property
    def turns(self) -> int:
        return len(self._script.turns)

    def think_s(self, turn: int) -> float:
        return self._script.turns[turn].think_s

    def request(self, turn: int) -> bytes:
        step = self._script.turns[turn]
        self._history += [run.json for run in step.runs if run.count]
        body = _common(self._generation, step.max_tokens)
        if turn + 1 < self.turns:
            body["return_token_ids"] = True
        # The ids are JSON already: 50,000 of them are not turned into text once more for each request.
        return json.dumps(body)[:-1].encode() + b', "prompt": [' + b",".join(self._history) + b"]}"

    def append(self, reply: Reply) -> None:
        if not reply.tokens:
            raise ReplyError("the server gave no token ids (return_token_ids): use the chat API with it")
        self._history.append(token_run(reply.tokens).json)
