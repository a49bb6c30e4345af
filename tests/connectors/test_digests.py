"""Block hashes to page digests."""

import numpy as np
import pytest

from kvferry.connectors.digests import page_digests, prompt_of
from kvferry.radix.digests import chain_digests, root_digest, tail_digest

BLOCK = 8
TOKENS = list(range(100, 100 + 61))
HASHES = [bytes(row) for row in chain_digests(np.array(TOKENS), page_size=BLOCK)]


def test_a_page_of_one_block_has_its_hash() -> None:
    assert page_digests(HASHES, 1, 7) == b"".join(HASHES)


def test_a_page_of_several_blocks_has_the_last_ones_hash() -> None:
    assert page_digests(HASHES, 3, 2) == HASHES[2] + HASHES[5]


@pytest.mark.parametrize(("blocks", "pages"), [(1, 8), (3, 3), (0, 1), (1, -1)])
def test_what_is_not_hashed_is_refused(blocks: int, pages: int) -> None:
    with pytest.raises(ValueError, match=r"block_hashes has 7 entries|blocks_per_page is"):
        page_digests(HASHES, blocks, pages)


def test_a_hash_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="each must have 32"):
        page_digests([b"x" * 16], 1, 1)


@pytest.mark.parametrize("per_page", [1, 2])
@pytest.mark.parametrize("count", [3, 8, 16, 17, 60, 61])
def test_the_tail_hangs_on_the_last_full_page(per_page: int, count: int) -> None:
    page, root = BLOCK * per_page, root_digest()
    prompt = prompt_of(HASHES, TOKENS, count, page_size=page, blocks_per_page=per_page, root=root)
    full = count // page
    assert prompt.tokens == count
    assert prompt.digests == b"".join(HASHES[(i + 1) * per_page - 1] for i in range(full))
    rest = TOKENS[full * page : count]
    want = tail_digest(rest, page_size=page, parent=prompt.digests[-32:] or root) if rest else b""
    assert prompt.tail_digest == want
