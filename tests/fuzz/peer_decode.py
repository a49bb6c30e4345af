"""Messages of a prefill daemon to a decode daemon that has dialled it, and what it writes into the slots.

A frame of an even tag is a PeerMessage; of an odd one a part: a write into a slot and its notification, by numbers, or,
of tag 3, of any bytes. The decode side has requests whose pages are awaited; in the end all are over, and nothing is
held.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Sequence
from random import Random
from unittest import mock

import grpc

from kvferry.daemon.core.errors import unavailable
from kvferry.daemon.peers import link as peer_link
from kvferry.daemon.peers.handshake import LOOK_UP, WAY_BACK
from kvferry.daemon.peers.session import SessionBroken
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.messages import Notification
from kvferry.transfer.protocol.slots import NOTICE_BYTES, PartHeader, PartNotice
from tests.fuzz.frames import Frame, bytes_changed, change, join, parsed, split
from tests.fuzz.peer_prefill import change_body, couriers, hello, said
from tests.fuzz.stage import EPOCH, FACTS, NAMES, PROMPTS, SLOTS, Call, Decode, Honest, Stage, run

_PART = struct.Struct("<BBBBHHH")  # slot, generation, transfer, lane, first page, byte offset, bytes
PART, RAW = 1, 3


def one_input(data: bytes) -> None:
    frames = split(data)
    if frames:
        run(lambda stage: _serve(stage, frames))


class _Frames(Call):
    """Parts come between the messages, in the order of the frames."""

    def __init__(self, frames: Sequence[Frame], stage: Stage) -> None:
        super().__init__([], stage.findings, stage.turn)
        self._frames = list(frames)
        self._stage = stage

    async def read(self) -> object:
        while self._frames and self._frames[0].tag % 2:
            for _ in range(4):
                await asyncio.sleep(0)
            self._stage.turn()
            land(self._stage, self._frames.pop(0))
        if self._frames:
            message = parsed(peer.PeerMessage, self._frames.pop(0).body)
            if message is None:
                raise SessionBroken("INTERNAL: a message that cannot be parsed")  # so gRPC ends the call
            self._messages = [message]
        return await super().read()

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    async def details(self) -> str:
        return "closed"

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()


def land(stage: Stage, frame: Frame) -> None:
    """The write, whole or not, and its notification."""
    link = stage.link
    if link is None:
        return
    if frame.tag == RAW:
        payload, written = frame.body[:NOTICE_BYTES], frame.body[NOTICE_BYTES:]
        slot = payload[4] if len(payload) > 4 else 0
    else:
        slot, generation, transfer, lane, first, offset, nbytes = _PART.unpack(
            frame.body[: _PART.size].ljust(10, b"\0")
        )
        payload = PartNotice(EPOCH, transfer, slot, generation).pack()
        header = PartHeader(
            epoch=EPOCH,
            transfer=transfer,
            slot=slot,
            generation=generation,
            lane=lane,
            first_page=first,
            byte_offset=offset,
            nbytes=nbytes,
            checksum=0,
        )
        written = header.pack() + frame.body[_PART.size :]
    if slot < link.host_slots.receive_slots:
        memory = link.host_slots.receive_slot(slot)
        memory[: len(written)] = written[: len(memory)]
    link.on_event(Notification(payload))


class _Stub:
    """In place of the gRPC stub: the first session is the input's; a second one there is not."""

    def __init__(self, call: _Frames, over: asyncio.Event) -> None:
        self._call, self._over, self._dialled = call, over, False

    def __call__(self, channel: object) -> _Stub:
        return self

    def Session(self, wait_for_ready: bool) -> _Frames:
        if self._dialled:
            self._over.set()
            raise SessionBroken("it was the last one")
        self._dialled = True
        return self._call


async def _serve(stage: Stage, frames: Sequence[Frame]) -> None:
    side = Decode(stage.clock)
    stage.sides.append(side)
    honest = Honest(side)
    honest.cache(NAMES[5], PROMPTS[0])
    honest.admit(NAMES[0], PROMPTS[1])
    honest.admit(NAMES[1], PROMPTS[2])
    honest.admit(NAMES[2], PROMPTS[3], new=3)
    over = asyncio.Event()
    link = side.links["p"]
    with mock.patch.object(peer_link, "PeerStub", _Stub(_Frames(frames, stage), over)):
        dialling = asyncio.ensure_future(link.run())
        while link.state != "down" or not link.error:  # what comes then is the wait before it dials again
            if dialling.done():
                break
            await asyncio.sleep(0)
        dialling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await dialling
    for name in NAMES[:3]:
        with contextlib.suppress(KeyError):
            honest.say("abort", name)
    honest.gone()
    side.on_link_down("p", unavailable("over"))


def _change_body(frame: Frame, chance: Random) -> Frame:
    if frame.tag % 2 == 0:
        return change_body(frame, chance)
    if frame.tag == RAW or len(frame.body) < _PART.size:
        return Frame(frame.tag, bytes_changed(frame.body, chance))
    numbers = list(_PART.unpack_from(frame.body))
    at = chance.randrange(len(numbers))
    numbers[at] = chance.choice((0, 1, 2, 3, 4, 8, 16, 32, 48, 255, numbers[at] + 1, numbers[at] ^ 1)) % 256
    return Frame(frame.tag, _PART.pack(*numbers) + frame.body[_PART.size :])


def mutate(data: bytes, most: int, seed: int) -> bytes:
    chance = Random(seed)
    return change(data, most, chance, SEEDS, _change_body)


def _seeds() -> list[bytes]:
    def part(slot: int, generation: int, transfer: int, first: int, nbytes: int, offset: int = 0) -> bytes:
        numbers = _PART.pack(slot, generation, transfer, 0, first, offset, nbytes)
        return join([Frame(PART, numbers + bytes(range(nbytes)))])

    def aux(number: int) -> bytes:
        return said(peer.PeerMessage(aux=peer.PeerAux(name=NAMES[number].to_proto(), blob=b"first token")))

    def failed(transfer: int) -> bytes:
        error = common.Error(code=common.ERROR_UNAVAILABLE, message="not here")
        return said(peer.PeerMessage(ask_failed=peer.AskFailed(transfer=transfer, error=error)))

    raw = PartNotice(EPOCH, 1, 3, 1).pack()
    ended = said(peer.PeerMessage(ask_ended=peer.AskEnded(transfer=2)))
    beat = said(peer.PeerMessage(heartbeat=peer.Heartbeat(sequence=1)))
    begin = said(hello(common.ROLE_PREFILL), *couriers(0)) + beat + beat
    both = said(hello(common.ROLE_PREFILL, WAY_BACK), *couriers(SLOTS)) + beat + beat
    both += said(
        peer.PeerMessage(credits=peer.Credits(credits=[peer.Credit(slot=slot, generation=1) for slot in (0, 1)]))
    )
    chosen = PROMPTS[1]
    back = peer.Ask(
        transfer=1,
        name=NAMES[0].to_proto(),
        namespace_id=FACTS.id,
        pages=2,
        tokens=len(chosen.tokens),
        last_full_digest=chosen.digests[-32:],
        tail_digest=chosen.tail,
    )
    looks = said(hello(common.ROLE_PREFILL, WAY_BACK, LOOK_UP), *couriers(SLOTS)) + beat + beat
    lookup = peer.Lookup(lookup=1, namespace_id=FACTS.id, digests=chosen.digests)
    lent = peer.Ask(transfer=1, name=NAMES[0].to_proto(), namespace_id=FACTS.id, pages=1, digests=chosen.digests[:32])
    asked = said(peer.PeerMessage(lookup=lookup), peer.PeerMessage(ask=lent))
    end = said(peer.PeerMessage(ask_end=peer.AskEnd(transfer=1, reason="too_late")))
    return [
        looks + asked + beat + end + aux(0) + beat,
        both + said(peer.PeerMessage(ask=back)) + beat + end + part(0, 1, 1, 2, 16) + aux(0) + beat,
        begin + part(0, 1, 1, 2, 16) + aux(0) + part(1, 1, 2, 2, 32) + aux(1) + part(2, 1, 3, 0, 96) + aux(2) + beat,
        begin + part(0, 1, 3, 0, 40) + part(1, 1, 3, 2, 56, 8) + part(1, 1, 3, 2, 56, 8) + failed(1) + aux(2) + beat,
        begin + failed(2) + ended + aux(1) + join([Frame(RAW, raw + bytes(80))]) + beat,
    ]


SEEDS = _seeds()
