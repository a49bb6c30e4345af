"""Replies spliced into later prompts, and what is lost, counted."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.front.chat import ByteTokenizer, ChatMessage
from kvferry.front.reply_memory import ChatPrompt, ChatPrompts, ReplyMemory, SpliceCounts, common_prefix
from tests.support.front_stack import PAGE_SIZE, Stack

AB, BC, END = 256, 257, 258


class PairTokenizer(ByteTokenizer):
    """Bytes, two pairs and an end token. Text is encoded greedily: the ids [a, BC] and [AB, c] both read "abc", and
    only the second comes back."""

    texts = ((AB, "ab"), (BC, "bc"), (END, "<end>"))

    def encode_piece(self, text: str) -> list[int]:
        tokens: list[int] = []
        while text:
            token, part = next(((t, p) for t, p in self.texts if text.startswith(p)), (ord(text[0]), text[0]))
            tokens.append(token)
            text = text[len(part) :]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        names = dict(self.texts)
        return "".join(names.get(token, chr(token % 256)) for token in tokens)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        return "".join(f"{m.role}:{m.content}<end>" for m in messages) + "assistant:"


class TrimmingTokenizer(PairTokenizer):
    """Its template strips messages."""

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        return super().render_chat([ChatMessage(m.role, m.content.strip()) for m in messages])


class ThinkingTokenizer(PairTokenizer):
    """Its template drops what was thought in earlier turns."""

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        return super().render_chat([ChatMessage(m.role, m.content.split("</think>")[-1]) for m in messages])


class ForgetfulTokenizer(PairTokenizer):
    """Its template leaves assistant messages out."""

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        return super().render_chat([m for m in messages if m.role != "assistant"])


class Chat:
    """A client that carries texts, before a front end that remembers."""

    def __init__(self, tokenizer: PairTokenizer | None = None, *, entries: int = 100, tokens: int = 10_000) -> None:
        self.tokenizer = tokenizer or PairTokenizer()
        self.memory = ReplyMemory(entries=entries, tokens=tokens)
        self.messages: list[ChatMessage] = []
        self.left: list[int] = []  # the last prompt and its reply

    def turn(self, user: str, reply: list[int], shown: str | None = None) -> ChatPrompt:
        """`shown`: what the client makes of the reply's text."""
        self.messages.append(ChatMessage("user", user))
        prompt = ChatPrompts(self.tokenizer, self.memory).build(self.messages)
        text = self.tokenizer.decode(reply)
        self.memory.remember(prompt.tokens, text, reply)
        self.messages.append(ChatMessage("assistant", text if shown is None else shown))
        self.left = prompt.tokens + reply
        return prompt


A, B, C = b"abc"


def test_without_replies_the_prompt_is_the_rendered_chat() -> None:
    prompt = Chat().turn("abc", [C])
    assert prompt.tokens == PairTokenizer().encode_piece("user:abc<end>assistant:")
    assert prompt.counts == SpliceCounts()


def test_a_reply_that_tokenises_differently_is_spliced() -> None:
    chat = Chat()
    chat.turn("hi", [A, BC, B])  # reads "abcb", and would come back as [AB, C, B]
    left = chat.left
    prompt = chat.turn("more", [C])
    assert prompt.tokens[: len(left)] == left
    assert prompt.tokens[len(left)] == END
    assert prompt.counts == SpliceCounts(spliced_replies=1, spliced_tokens=3)
    left = chat.left
    prompt = chat.turn("and more", [C])
    assert prompt.tokens[: len(left)] == left
    assert prompt.counts == SpliceCounts(spliced_replies=2, spliced_tokens=4)


def test_the_same_text_of_two_conversations_keeps_its_own_ids() -> None:
    chat = Chat()
    chat.turn("one", [A, BC])
    first, first_left = chat.messages, chat.left
    chat.messages = []
    chat.turn("two", [AB, C])
    second_left = chat.left
    chat.messages = [*first]
    assert chat.turn("x", [C]).tokens[: len(first_left)] == first_left
    chat.messages = [ChatMessage("user", "two"), ChatMessage("assistant", "abc")]
    assert chat.turn("y", [C]).tokens[: len(second_left)] == second_left


def test_two_replies_to_the_same_prompt() -> None:
    chat = Chat()
    chat.turn("one", [A, BC])
    chat.messages = []
    chat.turn("one", [B, B])
    chat.messages = [ChatMessage("user", "one"), ChatMessage("assistant", "abc")]
    prompt = chat.turn("x", [C])
    assert prompt.counts == SpliceCounts(spliced_replies=1, spliced_tokens=2)
    assert BC in prompt.tokens


def test_the_same_text_elsewhere_is_used_where_nothing_better_is_known() -> None:
    chat = Chat()
    chat.turn("one", [A, BC])
    chat.messages = [ChatMessage("user", "never asked"), ChatMessage("assistant", "abc")]
    prompt = chat.turn("x", [C])
    assert BC in prompt.tokens
    assert prompt.counts == SpliceCounts(spliced_replies=1, spliced_tokens=2)


def test_an_altered_reply_is_lost_once_and_exactly() -> None:
    chat = Chat()
    chat.turn("hi", [B, A, BC, B], shown="babx")  # comes back as [B, AB, x]: 3 of 4 tokens lost
    left = chat.left
    prompt = chat.turn("more", [C])
    assert prompt.counts == SpliceCounts(lost_replies=1, lost_tokens=3)
    assert common_prefix(prompt.tokens, left) == len(left) - 3
    left = chat.left
    prompt = chat.turn("again", [C])  # that loss is in the pages now: nothing more is lost
    assert common_prefix(prompt.tokens, left) == len(left)
    assert prompt.counts == SpliceCounts(spliced_replies=1, spliced_tokens=1)


def test_a_continued_reply_loses_nothing() -> None:
    chat = Chat()
    chat.turn("hi", [B, C], shown="bcx")
    chat.messages[-1] = ChatMessage("assistant", "bc")
    assert chat.turn("more", [C]).counts.spliced_replies == 1
    chat = Chat()
    chat.turn("hi", [B, B], shown="bbx")
    assert chat.turn("more", [C]).counts == SpliceCounts()


def test_what_was_never_generated_here_is_unknown() -> None:
    chat = Chat()
    chat.messages = [ChatMessage("user", "q"), ChatMessage("assistant", "abc")]
    prompt = chat.turn("hi", [C])
    assert prompt.tokens == PairTokenizer().encode_piece("user:q<end>assistant:abc<end>user:hi<end>assistant:")
    assert prompt.counts == SpliceCounts(unknown_replies=1, unknown_tokens=2)
    assert chat.turn("ho", [C]).counts == SpliceCounts(spliced_replies=1, spliced_tokens=1)


def test_what_was_pushed_out_is_lost() -> None:
    chat = Chat(entries=1)
    chat.turn("hi", [A, BC])
    history = list(chat.messages)
    chat.messages = []
    chat.turn("other", [B])
    assert chat.memory.entries == 1
    chat.messages = history
    assert chat.turn("more", [C]).counts == SpliceCounts(lost_replies=1, lost_tokens=2)


def test_a_template_that_strips() -> None:
    chat = Chat(TrimmingTokenizer())
    chat.turn("hi", [32, A, BC, 10])
    left = chat.left
    assert chat.turn("more", [C]).tokens[: len(left)] == left


def test_a_template_that_rewrites_loses_what_it_drops() -> None:
    chat = Chat(ThinkingTokenizer())
    thought = [*b"hm</think>", A, BC]
    chat.turn("hi", thought)
    prompt = chat.turn("more", [C])
    assert prompt.tokens == PairTokenizer().encode_piece("user:hi<end>assistant:abc<end>user:more<end>assistant:")
    assert prompt.counts == SpliceCounts(lost_replies=1, lost_tokens=len(thought))


def test_a_template_that_leaves_replies_out() -> None:
    chat = Chat(ForgetfulTokenizer())
    chat.turn("hi", [A, BC])
    prompt = chat.turn("more", [C])
    assert prompt.tokens == PairTokenizer().encode_piece("user:hi<end>user:more<end>assistant:")
    assert prompt.counts.unknown_replies == 1


def test_an_empty_reply() -> None:
    chat = Chat()
    chat.turn("hi", [])
    left = chat.left
    assert chat.turn("more", [C]).tokens[: len(left)] == left


def test_contents_that_look_like_the_template() -> None:
    chat = Chat()
    chat.turn("abc<end>assistant:abc", [A, BC])
    left = chat.left
    chat.turn("abc<end>", [A, BC])
    assert chat.left[: len(left)] == left


def test_bounds() -> None:
    memory = ReplyMemory(entries=3, tokens=10)
    for i in range(5):
        memory.remember([i], f"{i}", [1, 2])
    assert (memory.entries, memory.tokens) == (3, 6)
    memory.remember([9], "long", [1] * 9)
    assert (memory.entries, memory.tokens) == (1, 9)
    memory.remember([10], "too long", [1] * 11)
    assert (memory.entries, memory.tokens) == (0, 0)
    with pytest.raises(ValueError, match="entries must be >= 1, got 0"):
        ReplyMemory(entries=0, tokens=1)
    with pytest.raises(ValueError, match="tokens must be >= 1, got 0"):
        ReplyMemory(entries=1, tokens=0)


def test_used_replies_stay_longest() -> None:
    memory = ReplyMemory(entries=2, tokens=10)
    chat = Chat()
    chat.memory = memory
    chat.turn("hi", [A, BC])
    history = list(chat.messages)
    for other in ("one", "two", "three"):
        chat.messages = list(history)
        assert chat.turn(other, [C]).counts.spliced_tokens == 2


tokens = st.lists(st.sampled_from([A, B, C, AB, BC, 32]), max_size=12)


@given(st.lists(st.tuples(st.text("abc <end>", max_size=8), tokens), min_size=1, max_size=6))
def test_every_turn_begins_with_what_the_last_one_left(turns: list[tuple[str, list[int]]]) -> None:
    chat = Chat()
    for user, reply in turns:
        left = chat.left
        prompt = chat.turn(user, reply)
        assert prompt.tokens[: len(left)] == left
        assert prompt.counts.lost_replies == prompt.counts.unknown_replies == 0


@given(st.lists(st.tuples(tokens, st.none() | st.text("abc ", max_size=8)), min_size=1, max_size=6))
def test_loss_is_exact(turns: list[tuple[list[int], str | None]]) -> None:
    """What a turn cannot reuse of the one before is what is counted as lost there."""
    chat = Chat()
    for i, (reply, shown) in enumerate(turns):
        left = chat.left
        prompt = chat.turn(f"turn {i}", reply, shown)
        assert len(left) - common_prefix(prompt.tokens, left) == prompt.counts.lost_tokens


def test_through_the_front_end() -> None:
    """Synthetic ids above 255 never come back from their text: without the memory every reply would be lost."""
    with Stack() as stack:
        stack.decode[0].reply = lambda prompt: [1000 + len(prompt) + i for i in range(20)]
        messages = [{"role": "user", "content": "a question of more than a page of tokens"}]
        left = 0
        for _ in range(4):
            body = {"messages": messages, "max_tokens": 20}
            reply = httpx.post(f"{stack.url}/v1/chat/completions", json=body).json()
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == max(0, left - 1) // PAGE_SIZE * PAGE_SIZE
            left = reply["usage"]["total_tokens"]
            messages.append(reply["choices"][0]["message"])
            messages.append({"role": "user", "content": "and then?"})
        replies = httpx.get(f"{stack.url}/kvferry/stats").json()["replies"]
        assert replies["spliced_replies"] == 1 + 2 + 3
        assert replies["spliced_tokens"] == 20 * 6
        assert replies["lost_replies"] == replies["unknown_replies"] == 0
        assert replies["remembered_replies"] == 4
        messages[1]["content"] += "!"
        httpx.post(f"{stack.url}/v1/chat/completions", json={"messages": messages[:3], "max_tokens": 20})
        replies = httpx.get(f"{stack.url}/kvferry/stats").json()["replies"]
        assert (replies["lost_replies"], replies["lost_tokens"]) == (1, 20)
