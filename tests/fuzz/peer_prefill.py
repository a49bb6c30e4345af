"""Messages of a decode daemon to a prefill daemon: the whole service, from its Hello to the end of the session.

Each frame is a PeerMessage. The prefill side has prompts that are computed, begun, and cached; in the end the peer and
the worker are gone, and nothing is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, cast

from kvferry.daemon.peers.handshake import CAPABILITIES, LOOK_UP, WAY_BACK
from kvferry.daemon.services.peer import PeerService
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from tests.fuzz.frames import Frame, bytes_changed, change, join, message_changed, parsed, split
from tests.fuzz.stage import EPOCH, FACTS, NAMES, PROMPTS, SLOT_BYTES, SLOTS, WORDS, Call, Honest, Prefill, Stage, run


def one_input(data: bytes) -> None:
    messages = [parsed(peer.PeerMessage, frame.body) for frame in split(data)]
    if None in messages:
        messages = messages[: messages.index(None)]
    if messages:
        run(lambda stage: _serve(stage, messages))


async def _serve(stage: Stage, messages: Sequence[Any]) -> None:
    side = Prefill(stage.clock)
    stage.sides.append(side)
    honest = Honest(side)
    honest.begin(NAMES[0], PROMPTS[1], computed=True)
    honest.begin(NAMES[1], PROMPTS[2], computed=False)
    honest.say("progress", NAMES[1], tokens=8)
    side.ready_core.fetches.session_up(1)  # as the peer's will be: so this one waits for its Ask
    honest.begin(NAMES[2], PROMPTS[3], computed=False)
    call = Call(messages, stage.findings, stage.turn)
    try:
        await PeerService(side).Session(None, cast(Any, call))
    finally:
        honest.gone()


def change_body(frame: Frame, chance: Random) -> Frame:
    message = parsed(peer.PeerMessage, frame.body)
    if message is None or chance.random() < 0.1:
        return Frame(frame.tag, bytes_changed(frame.body, chance))
    message_changed(message, chance, WORDS)
    return Frame(frame.tag, message.SerializeToString())


def mutate(data: bytes, most: int, seed: int) -> bytes:
    chance = Random(seed)
    return change(data, most, chance, SEEDS, change_body)


def hello(role: int, *more: str) -> peer.PeerMessage:
    said = peer.PeerHello(
        protocol=1,
        protocol_min=1,
        daemon="p" if role == common.ROLE_PREFILL else "d",
        incarnation=bytes(16),
        role=role,
        facts=FACTS.to_proto(),
        epoch=EPOCH,
        page_bytes=FACTS.geometry.page_bytes,
        capabilities=(*CAPABILITIES, *more),
        ranks=1,
    )
    return peer.PeerMessage(hello=said)


def couriers(receive_slots: int) -> list[peer.PeerMessage]:
    up = peer.CourierUp(
        metadata=b"m", receive_address=1 << 20, receive_slots=receive_slots, slot_bytes=SLOT_BYTES + 256
    )
    return [peer.PeerMessage(courier_up=up), peer.PeerMessage(courier_connected=peer.CourierConnected())]


def said(*messages: peer.PeerMessage) -> bytes:
    return join([Frame(0, message.SerializeToString()) for message in messages])


def _seeds() -> list[bytes]:
    def ask(transfer: int, number: int, prompt: int, first: int, pages: int, held: int = 0) -> peer.PeerMessage:
        chosen = PROMPTS[prompt]
        ask = peer.Ask(
            transfer=transfer,
            name=NAMES[number].to_proto(),
            namespace_id=FACTS.id,
            first_page=first,
            pages=pages,
            promised_tokens=first * 4,
            tokens=len(chosen.tokens),
            last_full_digest=chosen.digests[-32:],
            tail_digest=chosen.tail,
            remaining_ms=1000,
            held_tokens=held * 4,
        )
        return peer.PeerMessage(ask=ask)

    def credits(*slots: tuple[int, int]) -> peer.PeerMessage:
        return peer.PeerMessage(
            credits=peer.Credits(credits=[peer.Credit(slot=slot, generation=number) for slot, number in slots])
        )

    begin = [hello(common.ROLE_DECODE), *couriers(SLOTS), credits(*((slot, 1) for slot in range(SLOTS)))]
    beat = peer.PeerMessage(heartbeat=peer.Heartbeat(sequence=1))
    done = peer.PeerMessage(done=peer.Done(name=NAMES[0].to_proto()))
    end = peer.PeerMessage(ask_end=peer.AskEnd(transfer=2, reason="enough"))
    both = [hello(common.ROLE_DECODE, WAY_BACK), *begin[1:]]
    error = common.Error(code=common.ERROR_UNAVAILABLE, message="not here")
    looks = [hello(common.ROLE_DECODE, WAY_BACK, LOOK_UP), *begin[1:]]
    found = [peer.PeerMessage(found=peer.Found(lookup=number, pages=2)) for number in (1, 2)]
    failed = peer.PeerMessage(ask_failed=peer.AskFailed(transfer=1, error=error))
    ended = peer.PeerMessage(ask_ended=peer.AskEnded(transfer=1))
    return [
        said(*looks, ask(1, 2, 3, 3, 3, 1), beat, *found, beat, failed, ask(2, 2, 3, 0, 1, 2), beat),
        said(*both, ask(1, 2, 3, 3, 3, 3), beat, failed, ended, beat, ask(2, 2, 3, 0, 1, 2), beat),
        said(
            *both, ask(1, 2, 3, 6, 0, 6), beat, beat, peer.PeerMessage(done=peer.Done(name=NAMES[2].to_proto())), beat
        ),
        said(*begin, ask(1, 0, 1, 0, 3), beat, credits((0, 2), (1, 2)), done, beat),
        said(*begin, ask(1, 0, 1, 1, 2), ask(2, 1, 2, 0, 4), beat, end, ask(3, 1, 2, 2, 1), beat, done),
        said(*begin, ask(1, 2, 3, 0, 6), ask(2, 0, 1, 3, 0), end, beat, credits((0, 2), (1, 2), (2, 2), (3, 2))),
    ]


SEEDS = _seeds()
