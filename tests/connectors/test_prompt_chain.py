"""A request's page digests: those of the whole chain, however it is asked for piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from kvferry.client.requests import RequestName
from kvferry.connectors.prompt_chain import AheadChain, KeysBetween, PromptChain
from kvferry.radix.digests import chain_digests, split_digests, tail_digest

PAGE = 8
ONE, OTHER = RequestName(bytes(16), 1), RequestName(bytes(15) + b"1", 1)


@dataclass
class Source:
    all_token_ids: list[int] = field(default_factory=list)
    prompt: int = 0  # tokens that are there by themselves, too

    @property
    def prompt_token_ids(self) -> list[int] | None:
        return self.all_token_ids[: self.prompt] or None


def of_pages(start: int, end: int) -> list[int | str] | None:
    """Something else for every page but the third."""
    return None if start == 2 * PAGE else ["salt", start] if start == 0 else [start - end]


def image_at(name: str, offset: int, length: int = PAGE) -> KeysBetween:
    """The keys of a request with one image, as vLLM has them: of every range that has some of it."""

    def keys(start: int, end: int) -> list[tuple[str, str, int]] | None:
        return [("mm", name, offset - start)] if start < offset + length and offset < end else None

    return keys


def looking_ahead(source: Source, keys: KeysBetween | None = None, name: RequestName = ONE) -> AheadChain:
    return AheadChain(source, PAGE, keys, None, name)


def want(tokens: list[int], keys: KeysBetween | None) -> tuple[bytes, bytes]:
    full = len(tokens) // PAGE
    extra = None if keys is None else {i: keys(i * PAGE, (i + 1) * PAGE) for i in range(full)}
    digests = chain_digests(tokens[: full * PAGE], page_size=PAGE, extra=extra).tobytes()
    rest = tokens[full * PAGE :]
    last = None if keys is None or not rest else {0: keys(full * PAGE, len(tokens))}
    return digests, tail_digest(rest, page_size=PAGE, parent=digests[-32:] or None, extra=last)


@pytest.mark.parametrize("keys", [None, of_pages])
def test_a_chain_that_grows_is_the_whole_chain(keys: KeysBetween | None) -> None:
    chosen = Random(4)
    for _ in range(40):
        source = Source()
        chain = PromptChain(source, PAGE, keys)
        for _ in range(6):
            source.all_token_ids += [chosen.randrange(1 << 17) for _ in range(chosen.randrange(30))]
            count = chosen.randint(0, len(source.all_token_ids))
            source.prompt = chosen.choice((0, count, count // 2))
            digests, tail = want(source.all_token_ids[:count], keys)
            if chosen.randrange(2):  # else the prompt hashes its pages itself
                assert chain.pages(count) == digests
            prompt = chain.prompt(count)
            assert (prompt.digests, prompt.tail_digest, prompt.tokens) == (digests, tail, count)


def test_requests_that_differ_in_their_keys_alone_share_nothing() -> None:
    source = Source(list(range(3 * PAGE + 5)))
    kinds: list[KeysBetween | None] = [None, lambda start, end: ["one"], lambda start, end: ["two"], of_pages]
    prompts = [PromptChain(source, PAGE, keys).prompt(3 * PAGE + 5) for keys in kinds]
    names = [{prompt.digests[i : i + 32] for i in range(0, 96, 32)} | {prompt.tail_digest} for prompt in prompts]
    assert len(set[bytes]().union(*names)) == 4 * len(kinds)


def test_tokens_that_are_not_there_are_not_hashed() -> None:
    with pytest.raises(AssertionError, match="has not 16 tokens"):
        PromptChain(Source(list(range(9))), PAGE, None).pages(16)


@pytest.mark.parametrize("keys", [None, of_pages])
def test_a_page_is_of_the_token_behind_it_where_its_kv_is(keys: KeysBetween | None) -> None:
    def named(tokens: list[int], count: int | None = None) -> list[bytes]:
        digests = looking_ahead(Source(tokens), keys).pages(len(tokens) if count is None else count)
        return [digests[i : i + 32] for i in range(0, len(digests), 32)]

    tokens = list(range(100, 100 + 3 * PAGE))
    assert named([*tokens, 1])[:2] == named([*tokens, 2])[:2]
    assert named([*tokens, 1])[2] != named([*tokens, 2])[2]  # another token behind the third page
    assert named(tokens)[2] not in (named([*tokens, 1])[2], named([*tokens, 2])[2])
    assert named([*tokens, 1], 2 * PAGE) == named([*tokens, 1])[:2]


@pytest.mark.parametrize(("offset", "common"), [(2 * PAGE - 1, 1), (2 * PAGE, 1), (2 * PAGE + 1, 2)])
def test_a_page_before_an_image_is_that_images_where_a_draft_looks_ahead(offset: int, common: int) -> None:
    """All images have one token, which does not tell them apart."""
    tokens = [*range(100, 100 + offset), *[7] * PAGE, *range(200, 200 + PAGE)]
    plain, one, other = (
        split_digests(looking_ahead(Source(tokens), keys).pages(3 * PAGE))
        for keys in (None, image_at("a", offset), image_at("b", offset))
    )
    assert plain[:common] == one[:common] == other[:common]
    assert not set(plain[common:]) & set(one[common:]) and not set(one[common:]) & set(other[common:])
    named = [PromptChain(Source(tokens), PAGE, image_at(name, offset)).pages(2 * PAGE) for name in "ab"]
    assert (named[0] == named[1]) is (offset >= 2 * PAGE), "without a draft by what is in it alone"


@pytest.mark.parametrize("offset", [PAGE, 2 * PAGE])
def test_an_images_page_that_ended_the_tokens_is_named_anew_when_they_go_on(offset: int) -> None:
    tokens = [*range(100, 100 + offset), *[7] * PAGE, *range(200, 200 + PAGE)]
    source = Source(tokens[:offset])
    chain = looking_ahead(source, image_at("a", offset))
    before = chain.prompt(offset)
    assert before.digests == looking_ahead(source).pages(offset), "no image is within its tokens"
    source.all_token_ids = tokens
    whole = looking_ahead(Source(tokens), image_at("a", offset))
    assert chain.prompt(offset) == whole.prompt(offset) != before
    assert chain.pages(3 * PAGE) == whole.pages(3 * PAGE) != looking_ahead(Source(tokens)).pages(3 * PAGE)


@pytest.mark.parametrize("keys", [None, of_pages])
@pytest.mark.parametrize("other", [OTHER, RequestName(ONE.request_id, 2)])
def test_a_page_that_ends_the_prompt_is_one_requests_alone(keys: KeysBetween | None, other: RequestName) -> None:
    source = Source(list(range(3 * PAGE)))
    ours, again, theirs = (looking_ahead(source, keys, name).prompt(3 * PAGE) for name in (ONE, ONE, other))
    assert ours == again and ours.digests[:64] == theirs.digests[:64] and ours.digests[64:] != theirs.digests[64:]
    source.all_token_ids += [7]
    ours, theirs = (looking_ahead(source, keys, name).prompt(3 * PAGE + 1) for name in (ONE, other))
    assert ours == theirs, "the page and what follows it are everybody's again"


def test_a_page_that_ended_the_prompt_is_named_anew_when_the_request_goes_on() -> None:
    source = Source(list(range(2 * PAGE)))
    chain = looking_ahead(source)
    prompt = chain.prompt(2 * PAGE)
    assert chain.prompt(2 * PAGE) == prompt
    source.all_token_ids += list(range(50, 50 + PAGE))
    assert chain.pages(3 * PAGE) == looking_ahead(source).pages(3 * PAGE)
    assert chain.pages(PAGE) == prompt.digests[:32] and chain.pages(2 * PAGE) != prompt.digests
    assert chain.prompt(2 * PAGE).digests == chain.pages(2 * PAGE)


@pytest.mark.parametrize("keys", [None, of_pages, image_at("a", PAGE, 2 * PAGE)])
def test_a_chain_that_looks_ahead_is_the_one_that_is_made_anew(keys: KeysBetween | None) -> None:
    chosen = Random(5)
    for _ in range(100):
        source = Source()
        chain = looking_ahead(source, keys)
        for _ in range(6):
            source.all_token_ids += [
                chosen.randrange(1 << 17) for _ in range(chosen.choice([0, 1, PAGE - 1, PAGE, 20]))
            ]
            there = len(source.all_token_ids)
            count = chosen.choice([there, there // PAGE * PAGE, chosen.randint(0, there)])
            if chosen.randrange(2):
                assert chain.pages(count) == looking_ahead(source, keys).pages(count)
            assert chain.prompt(count) == looking_ahead(source, keys).prompt(count)
