"""Recorded chats: [{"id", "messages": [{"role", "content"}]}], or as ShareGPT names it: conversations, from, value."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from kvferry.loadgen.distributions import Distribution, generator
from kvferry.loadgen.scripts import TextScript, TextTurn, TokenScript, WorkloadError

MAX_FILE_BYTES = 1 << 30
TOKENS_A_WORD = 4 / 3  # of English text: a recorded reply's length in tokens, where nothing else is asked for

_ROLES = {"human": "user", "user": "user", "system": "system"}
_ROLES |= dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant")
_log = logging.getLogger(__name__)


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: str = ""
    content: str | None = ""


class _Chat(BaseModel):
    model_config = ConfigDict(extra="ignore")
    messages: list[_Message]


class Exchange(NamedTuple):
    user: str
    reply: str  # as recorded


class Chat(NamedTuple):
    system: str
    exchanges: tuple[Exchange, ...]
    skipped: int = 0  # messages that are not understood


def read_chats(path: Path, limit: int | None = None) -> list[Chat]:
    """The first `limit` chats that have a user's message; each begins there, behind its system prompt. Messages
    without text or of unknown roles are left out, which the log tells. Raises WorkloadError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise WorkloadError(f"{path}: has {path.stat().st_size} bytes; it may have {MAX_FILE_BYTES}")
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{path}: {error}") from error
    if not isinstance(entries, list):
        raise WorkloadError(f"{path}: must be a list of chats, got {type(entries).__name__}")
    chats: list[Chat] = []
    skipped = 0
    adapter = TypeAdapter(_Chat)
    for i, entry in enumerate(entries):
        if limit is not None and len(chats) >= limit:
            break
        try:
            chat = _chat(adapter.validate_python(_openai_names(entry)))
        except ValidationError as error:
            raise WorkloadError(f"{path}: chat {i}: {_first(error)}") from None
        skipped += chat.skipped
        if chat.exchanges:
            chats.append(chat)
    if not chats:
        left_out = f"; {skipped} messages have no text or a role other than {', '.join(_ROLES)}" if skipped else ""
        raise WorkloadError(f"{path}: no chat has a user's message{left_out}")
    if skipped:
        _log.warning(
            "%s: %d messages left out: they have no text or a role other than %s", path, skipped, ", ".join(_ROLES)
        )
    return chats


def _openai_names(entry: object) -> object:
    """ShareGPT's names become OpenAI's."""
    if not isinstance(entry, dict) or not isinstance(entry.get("conversations"), list):
        return entry
    messages = [
        {"role": message.get("from"), "content": message.get("value")} if isinstance(message, dict) else message
        for message in entry["conversations"]
    ]
    return {"messages": messages}


def _first(error: ValidationError) -> str:
    detail = error.errors()[0]
    return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}, got {detail['input']!r:.60}"


def _chat(chat: _Chat) -> Chat:
    system, exchanges, skipped = "", list[Exchange](), 0
    for message in chat.messages:
        role = _ROLES.get(message.role)
        if role is None or message.content is None:
            skipped += 1
        elif role == "system" and not exchanges:
            system = message.content
        elif role == "user" and message.content:
            exchanges.append(Exchange(message.content, ""))
        elif role == "assistant" and exchanges and not exchanges[-1].reply:
            exchanges[-1] = Exchange(exchanges[-1].user, message.content)
    return Chat(system, tuple(exchanges), skipped)


class Chats:
    """The users' side of recorded chats; the replies are the server's, as long as the recorded ones by estimate."""

    def __init__(
        self, chats: list[Chat], *, seed: int, think_s: Distribution, output_tokens: Distribution | None, label: str
    ) -> None:
        self._chats = chats
        self._seed = seed
        self._think_s = think_s
        self._output = output_tokens
        self._label = label

    @property
    def name(self) -> str:
        output = "as recorded" if self._output is None else str(self._output)
        skipped = sum(chat.skipped for chat in self._chats)
        more = f", {skipped} messages left out" if skipped else ""
        return f"chats {self._label}: {len(self._chats)} conversations, output {output}{more}"

    @property
    def conversations(self) -> int:
        return len(self._chats)

    def turns(self, conversation: int) -> int:
        return len(self._chats[conversation].exchanges)

    def start_s(self, conversation: int) -> float | None:
        return None

    def text(self, conversation: int) -> TextScript:
        chat = self._chats[conversation]
        source = generator(self._seed, "chat", conversation)
        turns = []
        for k, exchange in enumerate(chat.exchanges):
            if self._output is None:
                output = max(1, math.ceil(len(exchange.reply.split()) * TOKENS_A_WORD))
            else:
                output = self._output.count(source, 1)
            turns.append(TextTurn(exchange.user, output, self._think_s.sample(source) if k else 0.0))
        return TextScript(chat.system, tuple(turns))

    def tokens(self, conversation: int) -> TokenScript:
        raise WorkloadError("recorded chats are text: use --api chat")
