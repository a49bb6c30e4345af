"""One session between daemons of several ranks: a prompt's pages from the GPUs of one to those of the other.

    python bench/gpu/lanes.py [--pairs 2:2 1:2 2:1 1:1] [--devices cuda:0,cuda:1,cuda:2,cuda:3] [--gib 1 4] [--latents]
        [--output FILE]

In P:D the prefill daemon has the first P of the devices and the decode daemon the last D; where there are fewer than
both together they share some, and bytes go from one GPU to another where that can be. This process is both workers: it
fills pages on all of prefill's ranks, asks for them at decode, and compares every byte on all of decode's ranks.
`ready` is the time from the report that all pages are computed to decode's Ready, `messages` what the same takes where
no page is missing, `moved` the rest; GB/s is payload over it. The limit is the sum of the links, `plain`: copies of as
many bytes, from each of prefill's GPUs to each of decode's that shares heads with it, all at once, in the same run;
`of links` is the share of it that `moved` has. With --latents (DeepSeek V3's shape) each of decode's ranks gets every
byte, and GB/s counts them all; `striped` is what plain copies take where each of decode's ranks gets its share from
prefill and has it from the others then. All GPUs compute until the report. Without GPUs: --devices cpu, and as
many ranks in host memory. It needs a kvferry that can be imported: installed, or as bench/gpu/build.sh lays it out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from delta import PAGE_SIZE, compute, daemon, factors_on, nothing_missing, rounds_of_products, stages, synchronize

from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName
from kvferry.daemon.cli.stack import Stack
from kvferry.proto import common_pb2

sys.path.insert(0, str(Path(__file__).parent.parent))
import rank_devices

WARM_UPS, ROUNDS = 2, 7


class Model(NamedTuple):
    layers: int
    kv_heads: int
    head_dim: int
    tensors: int

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.tensors * self.kv_heads * self.head_dim

    @property
    def facts(self) -> common_pb2.NamespaceFacts:
        geometry = common_pb2.Geometry(**self._asdict(), dtype="bfloat16")
        return common_pb2.NamespaceFacts(
            model="lanes", revision="1", geometry=geometry, digest_algorithm="sha256_cbor", root_digest=bytes(32)
        )


HEADS, LATENTS = Model(32, 8, 128, 2), Model(61, 1, 576, 1)  # of Llama-3.1-8B, of DeepSeek V3


@dataclass(frozen=True, slots=True)
class Side:
    """A daemon, and this process as its worker."""

    client: DaemonClient
    products: list[list[torch.Tensor]]  # the factors of each rank, on its device
    model: Model

    def fill(self, pages: torch.Tensor, seeds: torch.Tensor) -> None:
        for rank in range(len(self.products)):
            for layer in range(self.model.layers):
                self._layer(rank, layer)[pages.to(self._device(rank))] = self._content(rank, layer, seeds)

    def check(self, pages: torch.Tensor, seeds: torch.Tensor) -> None:
        """AssertionError where a byte is not what `fill` writes."""
        for rank in range(len(self.products)):
            for layer in range(self.model.layers):
                there = self._layer(rank, layer)[pages.to(self._device(rank))]
                assert torch.equal(there, self._content(rank, layer, seeds)), f"rank {rank}, layer {layer} differs"

    def _layer(self, rank: int, layer: int) -> torch.Tensor:
        """(pages, K and V, tokens, heads, bytes)."""
        return torch.as_tensor(self.client.pools.layer(rank, layer))

    def _device(self, rank: int) -> torch.device:
        return self._layer(rank, 0).device

    def _content(self, rank: int, layer: int, seeds: torch.Tensor) -> torch.Tensor:
        shape = self._layer(rank, layer).shape
        heads_before = rank * shape[3] if self.model.tensors > 1 else 0  # a latent is the same on all
        words = seeds.to(self._device(rank)).view(-1, 1, 1, 1, 1) + 7 * layer
        for axis, factor, first in ((1, 3, 0), (2, 5, 0), (3, 11, heads_before), (4, 1, 0)):
            of = [1] * 5
            of[axis] = -1
            words = words + factor * torch.arange(first, first + shape[axis], device=words.device).view(of)
        return (words % 251).to(torch.uint8)


def devices_of(pair: str, devices: list[str], model: Model) -> tuple[list[str], list[str]]:
    prefill, decode = map(int, pair.split(":"))
    if devices == ["cpu"]:
        return ["cpu"] * prefill, ["cpu"] * decode
    if model is LATENTS and max(prefill, decode) <= len(devices) < prefill + decode:
        return devices[:prefill], devices[::-1][:decode]  # as far as there are others, each has its latents from one
    return rank_devices.devices_of(devices, prefill, decode)


class Copy(NamedTuple):
    source: torch.Tensor
    target: torch.Tensor


def between(source: str, target: str, nbytes: int) -> Copy:
    return Copy(*(torch.empty(nbytes, dtype=torch.uint8, device=device) for device in (source, target)))


def links(sending: list[str], receiving: list[str], nbytes: int) -> list[list[Copy]]:
    """Copies of as many bytes, between all ranks that share heads at once."""
    pairs = rank_devices.pairs_of(len(sending), len(receiving))
    return [[between(sending[one], receiving[other], nbytes // len(pairs)) for one, other in pairs]]


def whole(sending: list[str], receiving: list[str], nbytes: int) -> list[list[Copy]]:
    """All bytes to each receiver, each from a sender of its own where there is one."""
    return [[between(sending[i % len(sending)], receiver, nbytes) for i, receiver in enumerate(receiving)]]


def striped(sending: list[str], receiving: list[str], nbytes: int) -> list[list[Copy]]:
    """A share to each receiver, then to each of the others, one after the other."""
    count = len(receiving)
    share = nbytes // count
    first = [between(sending[i % len(sending)], receiver, share) for i, receiver in enumerate(receiving)]
    turns = [
        [between(receiving[i], receiving[(i + turn) % count], share) for i in range(count)] for turn in range(1, count)
    ]
    return [first, *turns]


def seconds_of(steps: list[list[Copy]]) -> float:
    """Of copies that run at once in each step, after products on all of their devices."""
    devices = list(dict.fromkeys(each.device for step in steps for copy in step for each in copy))
    factors = [factors_on(device) for device in devices]
    streams = [
        [torch.cuda.Stream(copy.source.device) if copy.source.is_cuda else None for copy in step] for step in steps
    ]

    def copies() -> float:
        for _ in rounds_of_products(*factors):
            pass
        began = time.perf_counter()
        for step, of_step in zip(steps, streams, strict=True):
            for copy, stream in zip(step, of_step, strict=True):
                with torch.cuda.stream(stream):
                    copy.target.copy_(copy.source, non_blocking=True)
            synchronize(*devices)
        return time.perf_counter() - began

    return statistics.median([copies() for _ in range(WARM_UPS + ROUNDS)][WARM_UPS:])


def pool_of(model: Model, pages: int, ranks: int) -> list[str]:
    """A daemon's flags for so many pages: bytes of all ranks, each of which has a whole latent."""
    each = pages * PAGE_SIZE * model.token_bytes
    return ["--storage", "layer", "--pool-bytes", str(each * (ranks if model is LATENTS else 1))]


async def measure(pair: str, gib: float, args: argparse.Namespace) -> str:
    model = LATENTS if args.latents else HEADS
    sending, receiving = devices_of(pair, args.devices.split(","), model)
    page_bytes = PAGE_SIZE * model.token_bytes
    pages = int(gib * (1 << 30)) // page_bytes
    nbytes = pages * page_bytes
    limit = seconds_of((whole if args.latents else links)(sending, receiving, nbytes))
    shared = seconds_of(striped(sending, receiving, nbytes)) if args.latents else 0.0
    with Stack() as stack:
        words = [["--ranks", str(len(names))] if names[0] == "cpu" else [] for names in (sending, receiving)]
        at = ["cpu" if names[0] == "cpu" else ",".join(names) for names in (sending, receiving)]
        pools = [pool_of(model, 2 * pages + 64, len(names)) for names in (sending, receiving)]
        first = daemon(stack, "prefill", at[0], pools[0], words[0], args)
        address = stack.ready(first)
        second = daemon(stack, "decode", at[1], pools[1], [*words[1], "--peer", f"prefill={address}"], args)
        decode_address = stack.ready(second)
        sides = []
        for role, proto_role, names in (
            ("prefill", common_pb2.ROLE_PREFILL, sending),
            ("decode", common_pb2.ROLE_DECODE, receiving),
        ):
            socket = os.path.join(stack.folder, f"{role}.sock")
            client = await DaemonClient.connect(socket, proto_role, model.facts, "bench", deadline_s=60)
            sides.append(Side(client, [factors_on(torch.device(name)) for name in names], model))
        try:
            times = [await one(*sides, pages, check=number in (0, ROUNDS)) for number in range(WARM_UPS + ROUNDS)]
            floor = [await nothing_missing(*sides) for _ in range(ROUNDS)]
            found = await stages(decode_address) | await stages(address)
        except BaseException:
            print(first.tail(30), second.tail(30), sep="\n", file=sys.stderr)
            raise
        finally:
            for side in sides:
                await side.client.close()
    ready, messages = statistics.median(times[WARM_UPS:]), statistics.median(floor)
    moved = ready - messages
    told = ", ".join(f"{name} {found[name] * 1e6:.0f}" for name in ("gather", "write", "scatter") if name in found)
    if args.latents:
        nbytes *= len(receiving)
        told = f"striped {shared * 1e3:.2f} ms; {told}"
    return (
        f"{pair:5} {gib:5g} GiB {ready * 1e3:9.2f} {nbytes / ready / 1e9:5.0f} {messages * 1e3:9.2f} "
        f"{moved * 1e3:7.2f} {nbytes / moved / 1e9:5.0f} {limit * 1e3:8.2f} {nbytes / limit / 1e9:5.0f} "
        f"{limit / moved:8.0%}   {told}"
    )


async def one(prefill: Side, decode: Side, pages: int, check: bool) -> float:
    """Seconds from the report to Ready of a prompt all of whose pages are missing."""
    name, tokens = RequestName(os.urandom(16), 1), pages * PAGE_SIZE
    ask = {"digests": os.urandom(32 * pages), "tokens": tokens, "tail_digest": b"", "deadline_s": 60.0}
    prefill.client.begin(name, **ask)  # type: ignore[arg-type]
    begun = await prefill.client.begun(name)
    seeds = torch.randint(251, (pages,))
    if check:
        prefill.fill(torch.tensor(begun.pages), seeds)
    admit = partial(decode.client.admit, prefill="prefill", max_new_tokens=1)
    admitted = await admit(name, **ask)  # type: ignore[arg-type]
    await compute(prefill, decode)  # meanwhile the Ask arrives
    began = time.perf_counter()
    prefill.client.progress(name, tokens)
    prefill.client.aux(name, b"first")
    await decode.client.ready(name)
    took = time.perf_counter() - began
    if check:
        decode.check(torch.tensor(admitted.pages[:pages]), seeds)
    await decode.client.abort(name, "measured")
    await prefill.client.ended(name, 30.0)
    return took


def say(line: str, file: str | None) -> None:
    print(line, flush=True)
    if file is not None:
        with open(file, "a") as output:
            output.write(line + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=["2:2", "1:2", "2:1", "1:1"], metavar="P:D")
    parser.add_argument("--devices", default="cuda:0,cuda:1,cuda:2,cuda:3")
    parser.add_argument("--gib", nargs="+", type=float, default=[1.0, 4.0], help="of a prompt's pages, on all ranks")
    parser.add_argument("--latents", action="store_true", help="DeepSeek V3's in the place of keys and values by heads")
    parser.add_argument("--slot-bytes", default="64MiB")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--output", metavar="FILE", help="has the same behind what it had")
    args = parser.parse_args()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    say(
        f"{gpu}, torch {torch.__version__}, {os.cpu_count()} processors, {args.slots} slots of {args.slot_bytes} a "
        f"rank, {args.devices}",
        args.output,
    )
    say(
        "ranks payload   ready ms  GB/s  messages   moved  GB/s  plain ms  GB/s  of links   stages of a part, mean us",
        args.output,
    )
    for pair in args.pairs:
        for gib in args.gib:
            say(asyncio.run(measure(pair, gib, args)), args.output)
    say("every byte of two rounds of each row compared", args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
