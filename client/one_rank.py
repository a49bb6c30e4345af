"""A session of one rank, in an engine whose tensor-parallel ranks are processes of their own."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.proto import common_pb2, worker_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.rank_lanes import rank_geometry

TOGETHER_SECONDS = 35.0  # for which a rank waits for the others; a daemon says after 30 that some have not come


@dataclass(frozen=True, slots=True)
class OneRank:
    """Rank `rank` of `ranks`; `engine` is the same of all of them, and of no other engine."""

    rank: int
    ranks: int
    engine: str
    role: common_pb2.Role

    def to_proto(self) -> worker_pb2.OneRank:
        return worker_pb2.OneRank(rank=self.rank, ranks=self.ranks, engine=self.engine)

    def part_of(self, welcome: worker_pb2.Welcome, geometry: KVGeometry) -> tuple[worker_pb2.Welcome, KVGeometry]:
        """What a daemon's welcome says of this rank's memory. ValueError where it has none for it."""
        if len(welcome.rank_pools) != self.ranks:
            raise ValueError(f"rank_pools has {len(welcome.rank_pools)} entries; the engine has {self.ranks} ranks")
        own = worker_pb2.Welcome()
        own.CopyFrom(welcome)
        del own.rank_pools[:]
        own.rank_pools.append(welcome.rank_pools[self.rank])
        return own, rank_geometry(geometry, self.ranks)

    def opening(self, message: worker_pb2.WorkerMessage) -> worker_pb2.WorkerMessage:
        """This rank's part of an Admit or Begin: of all but rank 0 what says which answers it waits for."""
        if self.rank == 0:
            return message
        if message.WhichOneof("kind") == "admit":
            admit = message.admit
            own = worker_pb2.Admit(name=admit.name, tokens=admit.tokens, held_tokens=admit.held_tokens)
            own.held_blocks.extend(admit.held_blocks[:1])  # whether there are any
            return worker_pb2.WorkerMessage(admit=own)
        begin = worker_pb2.Begin(name=message.begin.name, patience=message.begin.patience)
        return worker_pb2.WorkerMessage(begin=begin)

    def refusal(self, name: common_pb2.RequestName, reason: str) -> tuple[worker_pb2.WorkerMessage, ...]:
        """What says that this rank takes no part in a request."""
        if self.role == common_pb2.ROLE_DECODE:
            opening = worker_pb2.WorkerMessage(admit=worker_pb2.Admit(name=name))
        else:
            opening = worker_pb2.WorkerMessage(begin=worker_pb2.Begin(name=name))
        return opening, worker_pb2.WorkerMessage(abort=worker_pb2.Abort(name=name, reason=reason))
