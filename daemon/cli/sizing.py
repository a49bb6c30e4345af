"""The arithmetic of docs/sizing.md: what a model, its chats and its servers need. Pure; sizes are bytes of all ranks
together unless they say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.daemon.memory.block_table import SHARING
from kvferry.radix.pool import HeldIndex
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.pool_shape import page_bytes_of
from kvferry.transfer.host_tier.rows import wanted_in_memory

PROCESS_BYTES, ON_GPUS_BYTES = 100 << 20, 200 << 20  # a daemon, without what it keeps
COURIER_BYTES = 60 << 20  # a session's process
CONTEXT_BYTES = 288 << 20  # of a GPU: a process's CUDA context, on an H200 260 to 270 MiB
TIER_BUFFERS_BYTES = (128 + 160) << 20  # of a GPU, with a host tier: what spills and restores are gathered in
TIER_TABLES = 512  # a GPU's own tables of a tier that is pinned take one of so many of its bytes
FILES, FILES_A_PEER, FILES_A_WORKER = 128, 16, 4
LEAST_PEERS = 64  # the defaults of --max-peers and --max-workers
PORTS_A_PEER = 2  # the kernel keeps those of an ended session for a minute
FIRST_PORT, LEAST_PORTS = 21000, 64


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """Conversations of one decode server: `running` at a time, `kept` more whose users are reading. Each has the same
    `system_tokens` in front, then `turns` turns of `turn_tokens` and an answer."""

    running: int
    kept: int
    turns: int
    system_tokens: int
    turn_tokens: int
    answer_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of a chat at its longest."""
        return self.system_tokens + self.turns * (self.turn_tokens + self.answer_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return self.tokens - self.answer_tokens


@dataclass(frozen=True, slots=True)
class Servers:
    """The engines and daemons: `ranks` GPUs each, or shared memory where `on_gpus` is not so. In `blocks` the pool is
    the engine's own. `pool_room`: that a decode daemon's pool may have at most; 0: what it needs. `prompts`: under way
    at a prefill server. `way_back`: as of `kvferry serve`."""

    ranks: int
    on_gpus: bool
    blocks: bool
    prefills: int
    decodes: int
    prompts: int
    pool_room: int
    slots: int
    slot_bytes: int
    way_back: str

    @property
    def ways(self) -> int:
        """Directions in which pages travel, each with slots of its own."""
        return 1 if self.way_back == "off" else 2


@dataclass(frozen=True, slots=True)
class Need:
    """What the daemon of one role needs."""

    role: str
    running_pages: int
    kept_pages: int  # on the device and the host together
    page_bytes: int
    row_bytes: int  # of a page in the host tier
    pool_bytes: int  # --pool-bytes
    host_bytes: int  # --host-bytes
    blocks_bytes: int  # that the engine needs of its own, where the pool is its blocks
    sessions: int
    slot_memory: int  # of all sessions
    gpu_bytes: int  # of each GPU, with the pool
    index_bytes: int  # of what is held, in /dev/shm
    shm_bytes: int  # /dev/shm: sizeLimit of a memory-backed volume
    memory_bytes: int  # of the daemon's container, with shared memory
    last_port: int  # of --ucx-ports, on one network interface
    files: int  # open ones

    @property
    def running_bytes(self) -> int:
        return self.running_pages * self.page_bytes


def pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def decode_need(geometry: KVGeometry, chats: ChatLoad, servers: Servers) -> Need:
    """The decode daemon's need. ValueError where so many ranks cannot share the heads, or `pool_room` does not hold
    what runs."""
    shared = chats.system_tokens // geometry.page_size  # full pages alone are shared
    a_chat = pages(chats.tokens, geometry.page_size) - shared
    running, kept = shared + chats.running * a_chat, chats.kept * a_chat
    page_bytes = page_bytes_of(geometry, servers.ranks)
    room = servers.pool_room // page_bytes if servers.pool_room else running
    if not servers.blocks and room < running:
        raise ValueError(
            f"--pool-room is {room} pages; {chats.running} chats at a time need {running}: it holds "
            f"{max(0, room - shared) // a_chat} of them, or more of fewer tokens"
        )
    on_device = 0 if servers.blocks else min(room - running, kept)
    host = kept - on_device + (shared if kept and servers.blocks else 0)
    pool = 0 if servers.blocks else (running + on_device) * page_bytes
    return _need("decode", geometry, servers, running, kept, pool, host * geometry.page_bytes)


def prefill_need(geometry: KVGeometry, chats: ChatLoad, servers: Servers) -> Need:
    """The prefill daemon's need: twice what is under way, since prompts that nobody has asked for hold half at most.
    ValueError where so many ranks cannot share the heads."""
    shared = chats.system_tokens // geometry.page_size
    under_way = servers.prompts * pages(chats.prompt_tokens, geometry.page_size)
    running = under_way if servers.blocks else 2 * under_way
    pool = 0 if servers.blocks else (running + shared) * page_bytes_of(geometry, servers.ranks)
    return _need("prefill", geometry, servers, running, shared, pool, 0)


def _need(
    role: str, geometry: KVGeometry, servers: Servers, running: int, kept: int, pool_bytes: int, host_bytes: int
) -> Need:
    sessions = servers.prefills if role == "decode" else servers.decodes
    page_bytes = page_bytes_of(geometry, servers.ranks)
    rank_slots = sessions * servers.ways * servers.slots * servers.slot_bytes
    slot_memory = rank_slots * servers.ranks
    gpu_bytes = 0
    if servers.on_gpus:
        buffers = TIER_BUFFERS_BYTES + host_bytes // TIER_TABLES if host_bytes else 0
        gpu_bytes = pool_bytes // servers.ranks + (1 + sessions) * CONTEXT_BYTES + rank_slots + buffers
    ids = SHARING * running if servers.blocks else pool_bytes // page_bytes
    index = HeldIndex.bytes_for(max(1, ids + host_bytes // geometry.page_bytes))
    shm = index + (0 if servers.on_gpus else pool_bytes)
    memory = shm + wanted_in_memory(0, host_bytes) + sessions * COURIER_BYTES
    memory += ON_GPUS_BYTES if servers.on_gpus else PROCESS_BYTES + slot_memory
    peers = max(LEAST_PEERS, sessions)
    return Need(
        role=role,
        running_pages=running,
        kept_pages=kept,
        page_bytes=page_bytes,
        row_bytes=geometry.page_bytes,
        pool_bytes=pool_bytes,
        host_bytes=host_bytes,
        blocks_bytes=running * page_bytes if servers.blocks else 0,
        sessions=sessions,
        slot_memory=slot_memory,
        gpu_bytes=gpu_bytes,
        index_bytes=index,
        shm_bytes=shm,
        memory_bytes=memory,
        last_port=FIRST_PORT + max(LEAST_PORTS, PORTS_A_PEER * sessions) - 1,
        files=FILES + FILES_A_PEER * peers + FILES_A_WORKER * LEAST_PEERS,
    )


def slots_for(gbit: float, round_trip_seconds: float, slot_bytes: int) -> int:
    """Slots that keep a link of so many Gbit/s full: as many bytes on their way as it carries in a round trip, and one
    slot more that is being copied."""
    return int(-(-gbit * 1e9 / 8 * round_trip_seconds // slot_bytes)) + 1
