"""The synthetic model: page content that follows from digests, and the check of every byte."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvferry.byte_tokens import VOCABULARY
from kvferry.client.rank_pools import RankPools
from kvferry.radix.digests import prompt_digests
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.workers.models.interface import Prompt, WrongPage
from kvferry.workers.models.sampling import Sampling
from kvferry.workers.models.synthetic import (
    SimulatedTime,
    SyntheticCompute,
    arrived_tail,
    output_token,
    page_content,
)

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=4, dtype="float32", page_size=4, layout=Layout.PAGE_NHD)
HEADS_FIRST = KVGeometry(layers=2, kv_heads=2, head_dim=4, dtype="float32", page_size=4, layout=Layout.PAGE_HND)


def prompt_of(tokens: list[int]) -> Prompt:
    array = np.array(tokens, dtype=np.uint32)
    digests = prompt_digests(array, page_size=GEOMETRY.page_size)
    return Prompt(array, digests.digests, digests.tail)


def compute(pages: int = 16) -> tuple[SyntheticCompute, np.ndarray]:
    pool = np.zeros((pages, GEOMETRY.page_bytes), dtype=np.uint8)
    return SyntheticCompute(RankPools.single(pool, GEOMETRY), SimulatedTime()), pool


def test_content_follows_from_the_digest() -> None:
    digests = [hashlib.sha256(bytes([i])).digest() for i in range(8)]
    contents = [page_content(digest, 1000).tobytes() for digest in digests]
    assert len(set(contents)) == 8
    assert contents == [page_content(digest, 1000).tobytes() for digest in digests]
    assert all(len(content) == 1000 for content in contents)


@pytest.mark.parametrize("geometry", [GEOMETRY, HEADS_FIRST])
def test_tail_is_zero_behind_the_last_token_of_every_fragment(geometry: KVGeometry) -> None:
    digest = hashlib.sha256(b"tail").digest()
    content = arrived_tail(digest, 3, geometry).reshape(geometry.fragments, geometry.page_size, -1)
    assert not content[:, 3].any()
    assert content[:, :3].any(axis=2).all()


def test_prefilled_pages_pass_the_check_of_decode_and_of_the_next_turn() -> None:
    model, pool = compute()
    prompt = prompt_of(list(range(10)))
    prefill = model.sequence(prompt, [3, 1, 2], Sampling(), shared_tokens=0)
    prefill.prompt(0, 3)
    prefill.prompt(3, 9)
    prefill.prompt(9, 10)
    token = prefill.first_token()
    assert pool[2].reshape(GEOMETRY.fragments, 4, -1)[:, 2:].any()
    pool[2].reshape(GEOMETRY.fragments, 4, -1)[:, 2:] = 0  # as a transfer does

    decode = model.sequence(prompt, [3, 1, 2], Sampling(), shared_tokens=8)
    decode.resume(10)
    decode.check_first_token(token)
    decode.add_pages([7])
    output = [token]
    for position in range(10, 16):
        output.append(decode.step(output[-1], position))
    decode.finish()
    assert output == [output_token(prompt, index) for index in range(7)]
    assert all(0 <= token < VOCABULARY for token in output)

    next_turn = prompt_of([*range(10), *output])
    model.sequence(next_turn, [3, 1, 2, 7, 9], Sampling(), shared_tokens=16).resume(16)


@pytest.mark.parametrize("byte", [0, 77, GEOMETRY.page_bytes - 1])
@pytest.mark.parametrize("page", [0, 1])
def test_one_wrong_byte_is_found_and_its_page_named(page: int, byte: int) -> None:
    model, pool = compute()
    prompt = prompt_of(list(range(6)))
    sequence = model.sequence(prompt, [5, 8], Sampling(), shared_tokens=0)
    sequence.prompt(0, 6)
    pool[8].reshape(GEOMETRY.fragments, 4, -1)[:, 2:] = 0
    pool[[5, 8][page], byte] ^= 1
    with pytest.raises(WrongPage, match=rf"page {[5, 8][page]} \(page {page} of the request\).*first at byte {byte}"):
        model.sequence(prompt, [5, 8], Sampling(), shared_tokens=4).resume(6)
    with pytest.raises(WrongPage):
        sequence.finish()


def test_a_prompt_that_ends_with_its_own_output_goes_on_where_it_was() -> None:
    model, _ = compute()
    asked = prompt_of(list(range(6)))
    expected = [output_token(asked, index) for index in range(9)]
    again = asked.extended(expected[:5], GEOMETRY.page_size)
    whole = prompt_of([*range(6), *expected[:5]])
    assert (again.tokens.tolist(), again.digests, again.tail_digest) == (
        whole.tokens.tolist(),
        whole.digests,
        whole.tail_digest,
    )
    sequence = model.sequence(again, [0, 1, 2, 3], Sampling(), shared_tokens=0, asked=asked)
    sequence.resume(0)
    sequence.prompt(0, 11)
    output = [sequence.first_token()]
    for position in range(11, 14):
        output.append(sequence.step(output[-1], position))
    sequence.finish()
    assert output == expected[5:9]


def test_output_that_was_changed_is_found() -> None:
    model, _ = compute()
    asked = prompt_of(list(range(6)))
    again = asked.extended([output_token(asked, 0), output_token(asked, 1) + 1], GEOMETRY.page_size)
    with pytest.raises(WrongPage, match="token 7 of the prompt is"):
        model.sequence(again, [0, 1], Sampling(), shared_tokens=0, asked=asked).resume(0)


def test_a_shared_page_is_never_written() -> None:
    model, _ = compute()
    sequence = model.sequence(prompt_of(list(range(8))), [0, 1], Sampling(), shared_tokens=4)
    with pytest.raises(AssertionError):
        sequence.prompt(0, 8)
