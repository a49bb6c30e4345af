"""Exact token ids of the front end's own replies, for the chat turns that carry them back as text.

A reply's text often tokenises differently from the ids that the model generated, and from that token on the KV held for
the conversation is of no use. So the ids are remembered and put into the next prompt as they were:

* `ReplyMemory.remember` keeps a reply under (the prompt it answered, its text);
* `ChatPrompts.build` renders the chat, finds the assistant messages in it, and splices the ids of those it knows.

What is still lost is counted once, at the prompt that loses it: **lost** where the reply is known to have been
generated here (its text was altered, cut inside a token, rewritten by the chat template, or its ids were pushed out of
the memory), **unknown** where no reply of this front end is known to have stood there (another client's history, a few-
shot example, an earlier process). Tokens lost are those generated for the reply behind the part that the new
tokenisation still shares with them; where the ids are gone, all of them.

One thread at a time may use a memory.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from kvferry.front.chat import ChatMessage, Tokenizer

_GHOSTS_PER_ENTRY = 8  # digests kept of replies that were pushed out, for each reply that may be kept
_ASSISTANT = "assistant"

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class PromptHash:
    """A running hash of a prompt's token ids: names what stands before a reply."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self._hash.update(array("I", tokens))

    def digest(self) -> bytes:
        return self._hash.copy().digest()


class ReplyKey(NamedTuple):
    prompt: bytes
    text: bytes

    @classmethod
    def of(cls, prompt: bytes, text: str) -> ReplyKey:
        return cls(prompt, hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest())


class _Recent(Generic[_Key, _Value]):
    """A mapping that forgets its oldest entries above a bound."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._items: OrderedDict[_Key, _Value] = OrderedDict()

    def put(self, key: _Key, value: _Value) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._bound:
            self._items.popitem(last=False)

    def get(self, key: _Key) -> _Value | None:
        return self._items.get(key)

    def __contains__(self, key: _Key) -> bool:
        return key in self._items


class ReplyMemory:
    """The ids of at most `entries` replies with at most `tokens` tokens in all; the least recently used go first."""

    def __init__(self, *, entries: int, tokens: int) -> None:
        if entries < 1:
            raise ValueError(f"entries must be >= 1, got {entries}")
        if tokens < 1:
            raise ValueError(f"tokens must be >= 1, got {tokens}")
        self._max_entries = entries
        self._max_tokens = tokens
        self._replies: OrderedDict[ReplyKey, array[int]] = OrderedDict()
        self._by_prompt: dict[bytes, ReplyKey] = {}  # the last reply to this prompt
        self._by_text: dict[bytes, ReplyKey] = {}  # the last reply with this text
        self._tokens = 0
        self._pushed_out: _Recent[bytes, int] = _Recent(entries * _GHOSTS_PER_ENTRY)  # prompt -> tokens of its reply
        self._accounted: _Recent[ReplyKey, None] = _Recent(entries * _GHOSTS_PER_ENTRY)

    @property
    def entries(self) -> int:
        return len(self._replies)

    @property
    def tokens(self) -> int:
        return self._tokens

    def remember(self, prompt: Sequence[int], text: str, tokens: Sequence[int]) -> None:
        """The reply to `prompt` was `tokens` (without the stop token), which the client was given as `text`."""
        key = ReplyKey.of(PromptHash(prompt).digest(), text)
        self._forget(key)
        self._replies[key] = array("I", tokens)
        self._by_prompt[key.prompt] = key
        self._by_text[key.text] = key
        self._tokens += len(tokens)
        while len(self._replies) > self._max_entries or self._tokens > self._max_tokens:
            oldest = next(iter(self._replies))
            self._pushed_out.put(oldest.prompt, len(self._replies[oldest]))
            self._forget(oldest)

    def exact(self, key: ReplyKey) -> Sequence[int] | None:
        """The ids of the reply with this text to this very prompt."""
        if key not in self._replies:
            return None
        self._replies.move_to_end(key)
        return self._replies[key]

    def same_text(self, key: ReplyKey) -> Sequence[int] | None:
        """The ids of the last reply with this text, whatever it answered."""
        found = self._by_text.get(key.text)
        return None if found is None else self.exact(found)

    def answered(self, prompt: bytes) -> Sequence[int] | None:
        """The ids of the last reply to this prompt, whatever its text."""
        found = self._by_prompt.get(prompt)
        return None if found is None else self._replies[found]

    def pushed_out(self, prompt: bytes) -> int | None:
        """The token count of a reply to this prompt whose ids are gone."""
        return self._pushed_out.get(prompt)

    def account(self, key: ReplyKey) -> bool:
        """Whether this is the first time that this reply could not be spliced: only then is it counted."""
        first = key not in self._accounted
        self._accounted.put(key, None)
        return first

    def _forget(self, key: ReplyKey) -> None:
        tokens = self._replies.pop(key, None)
        if tokens is None:
            return
        self._tokens -= len(tokens)
        if self._by_prompt.get(key.prompt) == key:
            del self._by_prompt[key.prompt]
        if self._by_text.get(key.text) == key:
            del self._by_text[key.text]


@dataclass(slots=True)
class SpliceCounts:
    spliced_replies: int = 0
    spliced_tokens: int = 0
    lost_replies: int = 0
    lost_tokens: int = 0
    unknown_replies: int = 0
    unknown_tokens: int = 0


class ChatPrompt(NamedTuple):
    tokens: list[int]
    counts: SpliceCounts


class ChatPrompts:
    """Makes token ids of chats, with the replies that the memory knows spliced in."""

    def __init__(self, tokenizer: Tokenizer, memory: ReplyMemory) -> None:
        self._tokenizer = tokenizer
        self._memory = memory

    def build(self, messages: Sequence[ChatMessage]) -> ChatPrompt:
        """The prompt's ids. Raises ChatTemplateError.

        An assistant message starts and ends a piece of its own even when it is not known, because the prompt that it
        answered ended there.
        """
        rendered = self._tokenizer.render_chat(messages)
        replies = [message.content for message in messages if message.role == _ASSISTANT]
        prompt = _Building(self._tokenizer, self._memory)
        if not replies:
            prompt.text(rendered)
            return prompt.done()
        pieces = self._pieces(messages, len(replies))
        if pieces is None or not rendered.startswith(pieces[0]):
            prompt.rewritten(replies[0], rendered)
            return prompt.done()
        prompt.text(pieces[0])
        cursor = len(pieces[0])
        for reply, piece in zip(replies, pieces[1:], strict=True):
            shown = next((s for s in (reply, reply.strip()) if rendered.startswith(s + piece, cursor)), None)
            if shown is None:
                prompt.rewritten(reply, rendered[cursor:])
                return prompt.done()
            prompt.reply(reply, shown)
            prompt.text(piece)
            cursor += len(shown) + len(piece)
        prompt.text(rendered[cursor:])
        return prompt.done()

    def _pieces(self, messages: Sequence[ChatMessage], replies: int) -> list[str] | None:
        """The rendered chat cut at the assistant messages' contents, or None where the template leaves one out."""
        mark = f"\ue000{secrets.token_hex(16)}\ue001"
        marked = [ChatMessage(m.role, mark if m.role == _ASSISTANT else m.content) for m in messages]
        pieces = self._tokenizer.render_chat(marked).split(mark)
        return pieces if len(pieces) == replies + 1 else None


class _Building:
    """A prompt under construction."""

    def __init__(self, tokenizer: Tokenizer, memory: ReplyMemory) -> None:
        self._tokenizer = tokenizer
        self._memory = memory
        self._tokens: list[int] = []
        self._hash = PromptHash()
        self._counts = SpliceCounts()

    def text(self, text: str) -> None:
        if text:
            self._add(self._tokenizer.encode_piece(text))

    def reply(self, text: str, shown: str) -> None:
        """An assistant message; `shown` is what the template made of its text."""
        key = ReplyKey.of(self._hash.digest(), text)
        known = self._memory.exact(key)
        if known is None and self._memory.answered(key.prompt) is None:
            known = self._memory.same_text(key)
        if known is not None:
            self._counts.spliced_replies += 1
            self._counts.spliced_tokens += len(known)
            self._add(known)
            return
        tokens = self._tokenizer.encode_piece(shown) if shown else []
        self._account(key, tokens, len(tokens))
        self._add(tokens)

    def rewritten(self, text: str, rest: str) -> None:
        """The template does not give this assistant message as it is: the rest of the prompt is tokenised whole."""
        tokens = self._tokenizer.encode_piece(rest)
        reply = self._tokenizer.encode_piece(text) if text else []
        self._account(ReplyKey.of(self._hash.digest(), text), tokens, len(reply))
        self._add(tokens)

    def done(self) -> ChatPrompt:
        return ChatPrompt(self._tokens, self._counts)

    def _add(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)
        self._hash.extend(tokens)

    def _account(self, key: ReplyKey, tokens: Sequence[int], reply_tokens: int) -> None:
        generated = self._memory.answered(key.prompt)
        lost = self._memory.pushed_out(key.prompt)
        if generated is not None:
            lost = len(generated) - common_prefix(generated, tokens)
        if lost == 0 or not self._memory.account(key):
            return
        if lost is None:
            self._counts.unknown_replies += 1
            self._counts.unknown_tokens += reply_tokens
        else:
            self._counts.lost_replies += 1
            self._counts.lost_tokens += lost


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of leading tokens that are the same."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
