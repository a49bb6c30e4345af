"""A reader of vLLM's KV events, written from its schema (vllm/distributed/kv_events.py) and not from our publisher: the
batch is an array, each event a map with its kind under `type`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import zmq


class BlockStored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass
class Router:
    """What a router knows from the events: by medium, the blocks that are there; of each, tokens and parent."""

    held: dict[str | None, set[int | bytes]] = field(default_factory=lambda: {"GPU": set(), "CPU": set()})
    tokens: dict[int | bytes, list[int]] = field(default_factory=dict)
    parents: dict[int | bytes, int | bytes | None] = field(default_factory=dict)
    cleared: int = 0

    def take(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.cleared += 1
                self.held = {"GPU": set(), "CPU": set()}
            elif isinstance(event, BlockRemoved):
                assert self.held[event.medium].issuperset(event.block_hashes)
                self.held[event.medium].difference_update(event.block_hashes)
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        assert self.held[event.medium].isdisjoint(event.block_hashes)
        if event.medium == "GPU":
            assert event.parent_block_hash is None or event.parent_block_hash in self.held["GPU"]
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)
            parent = event.parent_block_hash
            for i, block in enumerate(event.block_hashes):
                self.tokens[block] = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
                self.parents[block], parent = parent, block
        self.held[event.medium].update(event.block_hashes)

    def prompt_of(self, block: int | bytes) -> list[int]:
        """Tokens from the first page to this one's end."""
        tokens: list[int] = []
        at: int | bytes | None = block
        while at is not None:
            tokens = self.tokens[at] + tokens
            at = self.parents[at]
        return tokens


@dataclass
class Subscriber:
    """A context: a SUB socket, and a DEALER one for each replay."""

    endpoint: str
    replay_endpoint: str
    topic: str
    router: Router = field(default_factory=Router)
    sequences: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)

    def __enter__(self) -> Subscriber:
        self._context = zmq.Context()
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, self.topic)
        self._socket.connect(self.endpoint)
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy(linger=0)

    def read(self, seconds: float) -> bool:
        """The next batch; False where none came in time. In sequence, else an assertion."""
        if not self._socket.poll(seconds * 1000):
            return False
        self._take(*self._socket.recv_multipart())
        return True

    def replay(self, first: int) -> int:
        """Asks for all batches from `first` on; returns how many came."""
        # One request has many answers: not for a REQ socket.
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self.replay_endpoint)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        count = 0
        while socket.poll(5000):
            empty, topic, sequence, payload = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(sequence, "big", signed=True) == -1:
                assert (topic, payload) == (b"", b"")
                socket.close()
                return count
            self._take(topic, sequence, payload)
            count += 1
        raise AssertionError(f"the replay did not end; {count} batches came")

    def _take(self, topic: bytes, sequence: bytes, payload: bytes) -> None:
        number = int.from_bytes(sequence, "big")
        assert topic.decode() == self.topic
        assert not self.sequences or number == self.sequences[-1] + 1, "a gap"
        self.sequences.append(number)
        self.payloads.append(payload)
        batch = self._decoder.decode(payload)
        assert batch.data_parallel_rank == 0
        self.router.take(batch)
