"""A reply's tokens to the text that the client gets: detokenised, cut at stop strings, never a broken character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.front.chat import Tokenizer


class StopScanner:
    """Passes text through until a stop string occurs in it, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "a stop string must not be empty"
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that may go out now."""
        assert not self.stopped, "text after the stop string"
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """The text that was held back for nothing."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Delta(NamedTuple):
    text: str
    tokens: list[int]


class ExactReply(NamedTuple):
    """A reply as the memory keeps it: the ids whose text is exactly this."""

    text: str
    tokens: list[int]


class ReplyText:
    """One reply as it grows."""

    def __init__(self, tokenizer: Tokenizer, *, stop_tokens: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stop_tokens = frozenset(stop_tokens)
        self._scanner = StopScanner(stops)
        self.text = ""
        self.tokens: list[int] = []

    @property
    def stopped(self) -> bool:
        """A stop string occurred: nothing more is wanted."""
        return self._scanner.stopped

    def feed(self, tokens: Sequence[int]) -> Delta:
        """The text that these tokens make final, and those of them that belong to the reply."""
        assert not self.stopped, "tokens after the stop string"
        text = ""
        used: list[int] = []
        for token in tokens:
            used.append(token)
            if token not in self._stop_tokens:
                text += self._scanner.feed(self._detokenizer.feed(token))
            if self.stopped:
                break
        self.text += text
        self.tokens += used
        return Delta(text, used)

    def finish(self) -> str:
        """The rest of the text."""
        if self.stopped:
            return ""
        text = self._scanner.feed(self._detokenizer.finish())
        if not self.stopped:
            text += self._scanner.finish()
        self.text += text
        return text

    def exact(self) -> ExactReply:
        """The ids of the reply without its stop token.

        A stop string may have cut the text. Where it cut between two tokens, the ids before the cut are the reply's;
        where it cut inside one, no ids have this text, and the reply is given with all of its own.
        """
        tokens = self.tokens[:-1] if self.tokens and self.tokens[-1] in self._stop_tokens else self.tokens
        if not self.stopped:
            return ExactReply(self.text, tokens)
        for n in range(len(tokens), -1, -1):
            text = self._tokenizer.decode(tokens[:n])
            if text == self.text:
                return ExactReply(text, tokens[:n])
            if len(text) < len(self.text):
                break
        return ExactReply(self._tokenizer.decode(tokens), tokens)
