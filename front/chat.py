"""Tokenizers of the front end: a model folder's own (transformers), and a synthetic one whose tokens are bytes.

Both render a chat with a template and turn text into token ids and back. Encoding and decoding are safe from two
threads at once.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvferry.byte_tokens import SYNTHETIC, VOCABULARY

REPLACEMENT = "\ufffd"

_HELD_TOKENS = 16  # more tokens than this without a complete character are invalid bytes, not a character to come


class ChatMessage(NamedTuple):
    role: str
    content: str


class ChatTemplateError(ValueError):
    """The model's chat template refuses these messages, or the model has none."""


class Detokenizer(Protocol):
    """One reply's tokens to text, token by token; it never cuts a character in two."""

    def feed(self, token: int) -> str:
        """The text that became final with this token; "" while a character is incomplete."""

    def finish(self) -> str:
        """The rest of the text. A character whose bytes never became complete is left out."""


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a reply."""

    def encode_prompt(self, text: str) -> list[int]:
        """A whole prompt, with the special tokens that the model wants around it."""

    def encode_piece(self, text: str) -> list[int]:
        """A piece of a rendered chat: special tokens in it are parsed, none are added."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens; bytes that are no UTF-8 become U+FFFD."""

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The chat as text, up to where the reply begins. Raises ChatTemplateError."""

    def detokenizer(self) -> Detokenizer: ...


class ByteTokenizer:
    """Token id = byte. Synthetic workers generate ids above 255, too: those read " t<id>", which no text becomes again.

    The chat template: a line "[role]" before each message, "[assistant]" before the reply.
    """

    @property
    def vocab_size(self) -> int:
        return VOCABULARY

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode_piece(text)

    def encode_piece(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(_synthetic_bytes, tokens)).decode("utf-8", "replace")

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        return "".join(f"[{message.role}]\n{message.content}\n" for message in messages) + "[assistant]\n"

    def detokenizer(self) -> Detokenizer:
        return _ByteDetokenizer()


def _synthetic_bytes(token: int) -> bytes:
    return bytes((token,)) if token < 256 else f" t{token}".encode()


class _ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(_synthetic_bytes(token))

    def finish(self) -> str:
        return ""


class FolderTokenizer:
    """The tokenizer and chat template in a model's folder, loaded by transformers (never from the network)."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer  # seconds to import: only where it is used

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._vocab_size = len(self._tokenizer)
        self._stop_tokens = _stop_tokens(Path(folder), self._tokenizer.eos_token_id)
        # A tokenizer that puts a space before every text it is given must not do so inside a chat: such pieces are
        # encoded behind a special token, which is then dropped.
        anchor: str | None = self._tokenizer.eos_token
        self._anchor = ""
        if anchor is not None:
            behind = self._encode(anchor + "x")
            if behind[:1] == [self._tokenizer.eos_token_id] and behind[1:] != self._encode("x"):
                self._anchor = anchor

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self._stop_tokens

    def encode_prompt(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def encode_piece(self, text: str) -> list[int]:
        if not self._anchor:
            return self._encode(text)
        return self._encode(self._anchor + text)[1:]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        from jinja2.exceptions import TemplateError

        if not self._tokenizer.chat_template:
            raise ChatTemplateError("the model has no chat template: send the prompt to /v1/completions instead")
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ChatTemplateError(f"messages: the model's chat template refuses them: {error}") from error
        return text

    def detokenizer(self) -> Detokenizer:
        return WindowDetokenizer(self)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _stop_tokens(folder: Path, eos: int | None) -> tuple[int, ...]:
    """The end-of-text tokens of the tokenizer and of the folder's generation_config.json."""
    found = set() if eos is None else {eos}
    config = folder / "generation_config.json"
    if config.is_file():
        value = json.loads(config.read_text(encoding="utf-8")).get("eos_token_id")
        found.update(value if isinstance(value, list) else () if value is None else (value,))
    return tuple(sorted(found))


class WindowDetokenizer:
    """Incremental decoding for any tokenizer: decodes a window of the last tokens again and gives what was added to its
    text.

    The window keeps tokens whose text is out already, because a token's text can depend on the one before it (a leading
    space). U+FFFD at the end may be a character whose bytes are still to come, and is held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._known = 0  # leading tokens of the window whose text is out entirely
        self._emitted = 0  # characters of the window's text that are out

    def feed(self, token: int) -> str:
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        final = text.rstrip(REPLACEMENT)
        if len(self._window) - self._known > _HELD_TOKENS:
            final = text
        added = final[self._emitted :]
        self._emitted = max(self._emitted, len(final))
        if final == text:
            del self._window[: self._known]
            self._known = len(self._window)
            self._emitted = len(self._tokenizer.decode(self._window))
        return added

    def finish(self) -> str:
        return ""


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that an engine names in DescribeReply.tokenizer: a model's folder, or "synthetic".

    Raises ValueError where the folder is not there or holds no tokenizer.
    """
    if name == SYNTHETIC:
        return ByteTokenizer()
    if not Path(name).is_dir():
        raise ValueError(f"tokenizer: there is no folder {name!r} on this machine (--tokenizer names another one)")
    try:
        return FolderTokenizer(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer: the folder {name!r} holds no usable tokenizer: {error}") from error
