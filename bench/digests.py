"""Digest chain against OpenSSL over the same bytes in the same run.

Columns, nanoseconds a page, the best of interleaved repetitions:
  kvferry     one C++ call for the whole prompt: CBOR made and hashed
  hash limit  OpenSSL in one call over as many 64-byte blocks as the pages' messages take, no CBOR, no chain
  hashlib     OpenSSL page by page over messages encoded beforehand: the chain as Python would do it
  portable    kvferry without the processor's SHA instructions
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry import _core
from kvferry.radix import root_digest

NULL = b"\xf6"


class Row(NamedTuple):
    page_size: int
    pages: int
    message_bytes: float  # mean
    blocks: float  # mean
    kvferry_ns: float
    limit_ns: float
    hashlib_ns: float
    portable_ns: float


def encode_bodies(tokens: NDArray[np.uint32], page_size: int) -> list[bytes]:
    """What follows the parent in each page's message, made by the plain rule of CBOR."""

    def head(major: int, n: int) -> bytes:
        for limit, info, size in ((24, n, 0), (1 << 8, 24, 1), (1 << 16, 25, 2), (1 << 32, 26, 4)):
            if n < limit:
                return bytes([major << 5 | info]) + (n.to_bytes(size, "big") if size else b"")
        raise ValueError(n)

    items = [head(0, int(token)) for token in tokens]
    pages = range(0, len(items) - page_size + 1, page_size)
    return [head(4, page_size) + b"".join(items[at : at + page_size]) + NULL for at in pages]


def hashlib_chain(bodies: list[bytes], parent: bytes) -> bytes:
    for body in bodies:
        parent = hashlib.sha256(b"\x83\x58\x20" + parent + body).digest()
    return parent


def measure(page_size: int, total_tokens: int, vocabulary: int, repetitions: int) -> Row:
    tokens = np.random.default_rng(7).integers(0, vocabulary, total_tokens, dtype=np.uint32)
    parent = root_digest()
    bodies = encode_bodies(tokens, page_size)
    lengths = np.array([35 + len(body) for body in bodies])
    blocks = (lengths + 9 + 63) // 64
    same_blocks = bytes(int(blocks.sum()) * 64 - 9)  # with its padding exactly as many

    if _core.chain_digests(tokens, page_size, parent, NULL, {})[-1].tobytes() != hashlib_chain(bodies, parent):
        raise AssertionError("the two chains differ")
    contenders: list[Callable[[], object]] = [
        lambda: _core.chain_digests(tokens, page_size, parent, NULL, {}),
        lambda: hashlib.sha256(same_blocks).digest(),
        lambda: hashlib_chain(bodies, parent),
        lambda: _core.chain_digests(tokens, page_size, parent, NULL, {}, "portable"),
    ]
    best = [float("inf")] * len(contenders)
    for _ in range(repetitions):
        for i, contender in enumerate(contenders):
            begin = time.perf_counter_ns()
            contender()
            best[i] = min(best[i], (time.perf_counter_ns() - begin) / len(bodies))
    return Row(page_size, len(bodies), float(lengths.mean()), float(blocks.mean()), *best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000, help="length of the prompt (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=49_152, help="token ids below this (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--format", choices=["table", "json"], default="table")
    args = parser.parse_args()
    rows = [measure(size, args.tokens, args.vocabulary, args.repetitions) for size in args.page_sizes]
    if args.format == "json":
        print(json.dumps([row._asdict() for row in rows]))
        return
    print(f"{args.tokens} tokens, ids below {args.vocabulary}; SHA-256: {', '.join(_core.sha256_implementations())}")
    print("page  pages  bytes/page  blocks/page  kvferry ns  hash limit ns  of limit  hashlib ns  portable ns")
    for r in rows:
        print(
            f"{r.page_size:4}  {r.pages:5}  {r.message_bytes:10.1f}  {r.blocks:11.2f}  {r.kvferry_ns:10.0f}  "
            f"{r.limit_ns:13.0f}  {r.limit_ns / r.kvferry_ns:8.0%}  {r.hashlib_ns:10.0f}  {r.portable_ns:11.0f}"
        )


if __name__ == "__main__":
    main()
