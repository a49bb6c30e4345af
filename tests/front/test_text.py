"""Tokens to text: characters are never cut, stop strings always are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.front.chat import (
    REPLACEMENT,
    ByteTokenizer,
    ChatMessage,
    ChatTemplateError,
    FolderTokenizer,
    WindowDetokenizer,
    load_tokenizer,
)
from kvferry.front.text import ReplyText, StopScanner

TEXT = "naïve café 日本語 😀🏽 done"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a small byte-level BPE tokenizer, as transformers saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, "the cat sat on the mat, the dog too"] * 20, trainer)
    path = tmp_path_factory.mktemp("model")
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    saved.chat_template = TEMPLATE
    saved.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> FolderTokenizer:
    loaded = load_tokenizer(str(folder))
    assert isinstance(loaded, FolderTokenizer)
    return loaded


def test_folder_tokenizer(tokenizer: FolderTokenizer) -> None:
    assert 256 < tokenizer.vocab_size <= 400
    assert tokenizer.stop_tokens == (0, 2)
    chat = tokenizer.render_chat([ChatMessage("user", "hi"), ChatMessage("assistant", " ho ")])
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n ho <|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer.encode_piece(chat)
    assert (tokens[0], tokens.count(1), tokens.count(2)) == (1, 3, 2)
    assert tokenizer.decode(tokens).startswith("user\nhi\n")  # without special tokens
    assert tokenizer.encode_prompt("the cat") == tokenizer.encode_piece("the cat")


def test_a_template_that_refuses(tokenizer: FolderTokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="no tools here"):
        tokenizer.render_chat([ChatMessage("tool", "x")])


def test_a_model_without_a_template(folder: Path, tmp_path: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text((folder / file).read_text())
    with pytest.raises(ChatTemplateError, match="no chat template"):
        load_tokenizer(str(tmp_path)).render_chat([ChatMessage("user", "x")])


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="holds no usable tokenizer"):
        load_tokenizer(str(tmp_path))


def detokenised(tokenizer: FolderTokenizer | ByteTokenizer, tokens: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.finish()]


def test_no_character_is_cut(tokenizer: FolderTokenizer) -> None:
    for subject, tokens in (
        (tokenizer, tokenizer.encode_piece(TEXT)),
        (tokenizer, [t for b in TEXT.encode() for t in tokenizer.encode_piece(bytes([b]).decode("latin-1"))[-1:]]),
        (ByteTokenizer(), list(TEXT.encode())),
    ):
        pieces = detokenised(subject, tokens)
        assert "".join(pieces) == subject.decode(tokens)
        if "�" not in subject.decode(tokens):
            assert all(REPLACEMENT not in piece for piece in pieces)


def test_a_character_that_never_becomes_complete_is_left_out(tokenizer: FolderTokenizer) -> None:
    cut = list("ok 😀".encode())[:-1]
    assert "".join(detokenised(ByteTokenizer(), cut)) == "ok "


@given(ids=st.lists(st.integers(0, 10_000), max_size=60))
def test_any_tokens(tokenizer: FolderTokenizer, ids: list[int]) -> None:
    """Whatever the ids: what is given out is the whole text, but for an incomplete character at its end."""
    tokens = [i % tokenizer.vocab_size for i in ids]
    text = "".join(detokenised(tokenizer, tokens))
    whole = tokenizer.decode(tokens)
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {REPLACEMENT}


def test_bytes_that_are_no_text_come_out_at_last() -> None:
    class Invalid(ByteTokenizer):
        def decode(self, tokens: object) -> str:
            assert isinstance(tokens, list)
            return REPLACEMENT * len(tokens)

    detokenizer = WindowDetokenizer(Invalid())
    assert "".join(detokenizer.feed(0) for _ in range(40)) >= REPLACEMENT * 17


def test_synthetic_ids_above_bytes() -> None:
    tokens = [*b"a", 256, 31999, 0xE6, 0x97, 0xA5]
    assert ByteTokenizer().decode(tokens) == "a t256 t31999日"
    assert "".join(detokenised(ByteTokenizer(), tokens)) == "a t256 t31999日"


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=4))
def test_stop_strings(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    out = ""
    for piece in pieces:
        out += scanner.feed(piece)
        if scanner.stopped:
            break
    out += scanner.finish()
    text = "".join(pieces)
    found = [text.find(stop) for stop in stops if stop in text]
    if not found:
        assert out == text
    else:
        # The piece that completes the first stop string ends the text before the earliest one in it.
        assert scanner.stopped
        assert text.startswith(out)
        assert not any(stop in out for stop in stops)
        assert any(text.startswith(stop, len(out)) for stop in stops)


def test_reply_with_stop_token() -> None:
    reply = ReplyText(ByteTokenizer(), stop_tokens=(0,), stops=())
    assert reply.feed([*b"hi", 0]) == ("hi", [*b"hi", 0])
    assert reply.finish() == ""
    assert reply.exact() == ("hi", [*b"hi"])


def test_reply_held_back_for_a_stop_string() -> None:
    reply = ReplyText(ByteTokenizer(), stop_tokens=(), stops=("END",))
    assert reply.feed([*b"x E"]).text == "x "
    assert reply.feed([*b"N"]).text == ""
    assert reply.finish() == "EN"
    assert reply.exact() == ("x EN", [*b"x EN"])


def test_reply_cut_between_tokens_and_inside_one() -> None:
    reply = ReplyText(ByteTokenizer(), stop_tokens=(), stops=("cd",))
    assert reply.feed([*b"abcdef"]) == ("ab", [*b"abcd"])
    assert reply.exact() == ("ab", [*b"ab"])
    reply = ReplyText(ByteTokenizer(), stop_tokens=(), stops=("t3",))
    assert reply.feed([*b"ab", 300]) == ("ab ", [*b"ab", 300])
    assert reply.exact() == ("ab t300", [*b"ab", 300])
