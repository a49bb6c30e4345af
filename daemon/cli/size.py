"""`kvferry size`: pool, host tier, slots, ports and limits of memory for a model and its chats, by docs/sizing.md.

Exit status 2 where a flag or the model's file is wrong, or what runs does not fit the room.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from rich.console import Console
from rich.table import Table

from kvferry import flags
from kvferry.daemon.cli.model_config import ModelKV, read_model
from kvferry.daemon.cli.sizing import FIRST_PORT, ChatLoad, Need, Servers, decode_need, prefill_need, slots_for
from kvferry.daemon.config.values import parse_size, size
from kvferry.transfer.courier.messages import MAX_SLOTS
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.rank_lanes import MAX_RANKS

MIB = 1 << 20
HOST_SLOT_BYTES, GPU_SLOT_BYTES = 8 * MIB, 64 * MIB  # the defaults of --slot-bytes
DEFAULT_SLOTS = 16
MIN_SLOT_BYTES, MAX_SLOT_BYTES = 4096, 1 << 29
DEFAULT_PEERS = 64  # --max-peers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="its config.json, or the folder of it")
    chats = parser.add_argument_group("chats, of all decode servers together")
    for flag, default, what in (
        ("--chats", 32, "at a time, while they are computed"),
        ("--kept", 0, "more whose users are reading, to be met again"),
        ("--turns", 1, "of each chat, at its longest"),
        ("--system-tokens", 0, "that all chats begin with"),
        ("--turn-tokens", 8000, "that a turn brings, without its answer"),
        ("--answer-tokens", 500, "of an answer (max_tokens)"),
    ):
        kind = flags.whole_or_0 if flag in ("--kept", "--system-tokens") else flags.whole
        chats.add_argument(flag, type=kind, default=default, metavar="N", help=f"{what} (default {default})")
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--gpus", type=flags.whole_or_0, default=1, metavar="N", help="of each engine; 0: on CPUs (default 1)"
    )
    for flag, default, what in (
        ("--prefills", 1, "prefill servers"),
        ("--decodes", 1, "decode servers"),
        ("--prompts", 8, "under way at a time at each prefill server"),
    ):
        servers.add_argument(flag, type=flags.whole, default=default, metavar="N", help=f"{what} (default {default})")
    servers.add_argument(
        "--pool", choices=("daemon", "engine"), default="daemon", help="as of kvferry serve; engine: vLLM's blocks"
    )
    servers.add_argument(
        "--way-back", choices=("off", "auto", "always"), default="off", help="as of kvferry serve, on both sides"
    )
    _add_size(servers, "--pool-room", "that a decode server's pool may have, over its GPUs (default: for what runs)")
    servers.add_argument("--page-size", type=flags.whole, default=64, metavar="TOKENS", help="default %(default)s")
    servers.add_argument("--kv-dtype", default="", metavar="DTYPE", help="bfloat16, fp8, ... (default: the model's)")
    link = parser.add_argument_group("the network between them")
    link.add_argument("--gbit", type=flags.positive, metavar="GBIT/S", help="that slots are to keep full")
    link.add_argument(
        "--round-trip-ms", type=flags.positive, default=1.0, metavar="MS", help="of it, with copies (default 1)"
    )
    _add_size(link, "--slot-bytes", "of a slot (default 8MiB, on GPUs 64MiB)")
    parser.add_argument("--format", choices=("table", "json"), default="table")


def _add_size(group: argparse._ArgumentGroup, flag: str, what: str) -> None:
    group.add_argument(flag, type=flags.parsed(parse_size), default=0, metavar="SIZE", help=what)


def run(args: argparse.Namespace) -> int:
    try:
        servers = _servers(args)
    except ValueError as error:
        print(f"kvferry size: {error}", file=sys.stderr)
        return 2
    # Those of one decode server.
    running, kept = (-(-count // servers.decodes) for count in (args.chats, args.kept))
    chats = ChatLoad(running, kept, args.turns, args.system_tokens, args.turn_tokens, args.answer_tokens)
    try:
        model = read_model(args.model)
        geometry = model.geometry(args.page_size, args.kv_dtype)
        needs = (decode_need(geometry, chats, servers), prefill_need(geometry, chats, servers))
    except ValueError as error:
        print(f"kvferry size: {error}", file=sys.stderr)
        return 2
    words = {need.role: _serve_words(need, geometry, servers) for need in needs}
    if args.format == "json":
        print(json.dumps(_as_json(model, geometry, chats, needs, words)))
    else:
        _show(model, geometry, chats, servers, needs, words)
    return 0


def _servers(args: argparse.Namespace) -> Servers:
    """ValueError names the flag, its value and the bound."""
    slot_bytes = args.slot_bytes or (GPU_SLOT_BYTES if args.gpus else HOST_SLOT_BYTES)
    slots = DEFAULT_SLOTS if args.gbit is None else slots_for(args.gbit, args.round_trip_ms / 1000, slot_bytes)
    ranks = max(1, args.gpus)
    if ranks > MAX_RANKS:
        raise ValueError(f"--gpus is {args.gpus}; it must be 0 to {MAX_RANKS}")
    if not MIN_SLOT_BYTES <= slot_bytes <= MAX_SLOT_BYTES:
        raise ValueError(f"--slot-bytes is {slot_bytes}; it must be {MIN_SLOT_BYTES} to {MAX_SLOT_BYTES}")
    if slots * ranks > MAX_SLOTS:
        link = f"--gbit is {args.gbit:g} and --round-trip-ms {args.round_trip_ms:g}"
        raise ValueError(
            f"{link}: {slots} slots of each of {ranks} ranks; they may be {MAX_SLOTS}: a larger --slot-bytes"
        )
    return Servers(
        ranks=ranks,
        on_gpus=bool(args.gpus),
        blocks=args.pool == "engine",
        prefills=args.prefills,
        decodes=args.decodes,
        prompts=args.prompts,
        pool_room=args.pool_room,
        slots=slots,
        slot_bytes=slot_bytes,
        way_back=args.way_back,
    )


def _serve_words(need: Need, geometry: KVGeometry, servers: Servers) -> list[str]:
    """The flags of `kvferry serve`; sizes in whole MiB, rounded up."""
    words = ["--role", need.role, "--page-size", str(geometry.page_size)]
    if servers.on_gpus:
        words += ["--device", ",".join(f"cuda:{i}" for i in range(servers.ranks))]
    words += ["--pool", "engine"] if servers.blocks else ["--pool-bytes", _mib(need.pool_bytes)]
    if need.host_bytes:
        words += ["--host-bytes", _mib(need.host_bytes)]
    words += ["--slots", str(servers.slots), "--slot-bytes", str(servers.slot_bytes)]
    words += ["--ucx-ports", f"{FIRST_PORT}-{need.last_port}"]
    if servers.way_back != "off":
        words += ["--way-back", servers.way_back]
    return words if need.sessions <= DEFAULT_PEERS else [*words, "--max-peers", str(need.sessions)]


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // MIB)}MiB"


def _as_json(
    model: ModelKV, geometry: KVGeometry, chats: ChatLoad, needs: tuple[Need, ...], words: dict[str, list[str]]
) -> dict[str, object]:
    return {
        "model": dataclasses.asdict(model),
        "token_bytes": geometry.token_bytes,
        "page_bytes": geometry.page_bytes,
        "chat_tokens": chats.tokens,
        "servers": {need.role: {**dataclasses.asdict(need), "serve": words[need.role]} for need in needs},
    }


def _show(
    model: ModelKV,
    geometry: KVGeometry,
    chats: ChatLoad,
    servers: Servers,
    needs: tuple[Need, ...],
    words: dict[str, list[str]],
) -> None:
    kind = "a latent" if model.tensors == 1 else f"2 x {model.kv_heads} KV heads"
    indexer = f", an indexer's keys x {model.index_dim}" if model.index_dim else ""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(f"{model.name}: {model.layers} layers, {kind} x {model.head_dim}, {geometry.dtype}{indexer}")
    console.print(
        f"a token {geometry.token_bytes:,} bytes, a page of {geometry.page_size} tokens {size(geometry.page_bytes)}, "
        f"a chat of {chats.tokens:,} tokens {size(-(-chats.tokens // geometry.page_size) * geometry.page_bytes)}"
    )
    table = Table()
    table.add_column("of each daemon")
    for need in needs:
        table.add_column(need.role, justify="right")
    for name, values in _rows(needs, servers):
        if any(values):
            table.add_row(name, *(value or "-" for value in values))
    console.print(table)
    for need in needs:
        console.print("kvferry serve " + " ".join(words[need.role]))


def _rows(needs: tuple[Need, ...], servers: Servers) -> list[tuple[str, list[str]]]:
    def sized(values: list[int]) -> list[str]:
        return [size(value) if value else "" for value in values]

    pool = [f"{size(need.pool_bytes)}, {need.pool_bytes // need.page_bytes:,} pages" for need in needs]
    return [
        ("what runs", sized([need.running_bytes for need in needs])),
        ("pool (--pool-bytes)", [] if servers.blocks else pool),
        ("the engine's own blocks, at least", sized([need.blocks_bytes for need in needs])),
        ("host tier (--host-bytes)", sized([need.host_bytes for need in needs])),
        ("sessions", [str(need.sessions) for need in needs]),
        (
            f"their slots, {servers.ways * servers.slots} x {size(servers.slot_bytes)} a rank",
            sized([need.slot_memory for need in needs]),
        ),
        ("memory of each GPU, for the daemon", sized([need.gpu_bytes for need in needs])),
        ("/dev/shm", sized([need.shm_bytes for need in needs])),
        ("  of it, the index of what is held", sized([need.index_bytes for need in needs])),
        ("memory limit, /dev/shm included", sized([need.memory_bytes for need in needs])),
        ("UCX ports", [f"{FIRST_PORT}-{need.last_port}" for need in needs]),
        ("open files (ulimit -n)", [str(need.files) for need in needs]),
    ]
