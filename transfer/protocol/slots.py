"""The slot protocol: what a part looks like in a slot, what its notification says, and who may write a slot when.

A slot holds one part: HEADER_BYTES of header, then the payload, a byte range of a transfer's pages, that is of their
rows on one lane, taken in prompt order. The receiver grants a slot as a credit (slot, generation). The sender spends a
credit on one write and its notification. The receiver takes the slot when the notification names the generation that it
granted, copies the payload out, and grants the slot anew under the next generation, so whatever still names an older
generation is refused. Slots belong to ranks: where each has n, slot i is rank i // n's.

    receiver's slot:  FREE -> GRANTED -> TAKEN -> GRANTED (generation + 1) ...
                                           \\-> WITHHELD: not what the notification said; lost to the session

Where a session has checksums, a part's is the sum that the copies on both sides make of the payload (`part_checksum`),
with the rest of the header added: so neither another payload nor another place for it is believed.

All integers are little-endian and unsigned.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvferry._core import part_checksum

HEADER_BYTES = 64
NOTICE_BYTES = 32
PART_VERSION = 1
MAX_SLOTS = 1 << 16  # a session has tens; a bound for what peers say

_HEADER_MAGIC = 0x5046564B  # b"KVFP" in memory
_NOTICE_MAGIC = 0x4E46564B  # b"KVFN" in memory
_HEADER = struct.Struct("<IHHQQQIIQQQ")
_CHECKSUM_BYTES = 8  # the last of the header
_NOTICE = struct.Struct("<IIQQQ")
assert _HEADER.size == HEADER_BYTES
assert _NOTICE.size == NOTICE_BYTES

Buffer = bytes | bytearray | memoryview


class SlotError(ValueError):
    """A value that the slot protocol forbids, named by `field`. From a peer: the session is to be ended."""

    def __init__(self, field: str, value: object, bound: str) -> None:
        super().__init__(f"{field} is {value}, must be {bound}")
        self.field = field


class StaleCredit(SlotError):
    """A credit of a slot that there is, but at the wrong time."""


def check_unsigned(field: str, value: int, bits: int) -> None:
    """Raises SlotError unless the value fits so many bits."""
    if not 0 <= value < 1 << bits:
        raise SlotError(field, value, f"in 0..2^{bits}-1")


class PartHeader(NamedTuple):
    """The first HEADER_BYTES of a slot.

    The part's payload is the bytes [byte_offset, byte_offset + nbytes) of the lane's rows of the pages from
    `first_page` on, laid end to end; `first_page` is an index into the prompt's pages and holds the part's first byte,
    so byte_offset < row_bytes.
    """

    epoch: int  # of the receiver's pool, 64 bits
    transfer: int  # 64 bits
    slot: int  # the receiver's, 32 bits
    generation: int  # of the credit, 64 bits
    lane: int  # 16 bits
    first_page: int  # 32 bits
    byte_offset: int  # 64 bits
    nbytes: int  # payload without the header, 64 bits
    checksum: int = 0  # 64 bits; nothing is said by it in a session without checksums

    def checksum_of(self, payload_sum: int) -> int:
        """The value of `checksum` where the payload's `part_checksum` is this. Raises SlotError as `pack` does."""
        return (payload_sum + part_checksum(self.pack()[:-_CHECKSUM_BYTES])) % (1 << 64)

    def with_sum(self, payload_sum: int) -> PartHeader:
        """This header with the checksum of a payload whose `part_checksum` is this. Raises as `checksum_of`."""
        return self._replace(checksum=self.checksum_of(payload_sum))

    def pack(self) -> bytes:
        """The HEADER_BYTES bytes. Raises SlotError for a field that does not fit its bits."""
        fields = self.epoch, self.transfer, self.generation, self.slot, self.first_page, self.byte_offset, self.nbytes
        try:
            return _HEADER.pack(_HEADER_MAGIC, PART_VERSION, self.lane, *fields, self.checksum)
        except struct.error:  # only now: which it is
            check_unsigned("part.lane", self.lane, 16)
            check_unsigned("part.slot", self.slot, 32)
            check_unsigned("part.first_page", self.first_page, 32)
            for field in ("epoch", "transfer", "generation", "byte_offset", "nbytes", "checksum"):
                check_unsigned(f"part.{field}", getattr(self, field), 64)
            raise

    @staticmethod
    def unpack(buffer: Buffer) -> PartHeader:
        """Reads the header at the start of `buffer`, each byte once. Raises SlotError for length, magic or version."""
        if len(buffer) < HEADER_BYTES:
            raise SlotError("part.length", f"{len(buffer)} bytes", f"at least {HEADER_BYTES}")
        magic, version, lane, epoch, transfer, generation, slot, first_page, byte_offset, nbytes, checksum = (
            _HEADER.unpack_from(buffer)
        )
        if magic != _HEADER_MAGIC:
            raise SlotError("part.magic", f"{magic:#010x}", f"{_HEADER_MAGIC:#010x}")
        if version != PART_VERSION:
            raise SlotError("part.version", version, str(PART_VERSION))
        return PartHeader(
            epoch=epoch,
            transfer=transfer,
            slot=slot,
            generation=generation,
            lane=lane,
            first_page=first_page,
            byte_offset=byte_offset,
            nbytes=nbytes,
            checksum=checksum,
        )


class PartNotice(NamedTuple):
    """The notification that follows a part's write: which slot was written, under which credit, for which transfer."""

    epoch: int
    transfer: int
    slot: int
    generation: int

    def pack(self) -> bytes:
        """The NOTICE_BYTES bytes. Raises SlotError for a field that does not fit its bits."""
        try:
            return _NOTICE.pack(_NOTICE_MAGIC, self.slot, self.epoch, self.transfer, self.generation)
        except struct.error:  # only now: which it is
            check_unsigned("notification.slot", self.slot, 32)
            for field in ("epoch", "transfer", "generation"):
                check_unsigned(f"notification.{field}", getattr(self, field), 64)
            raise

    @staticmethod
    def unpack(payload: Buffer) -> PartNotice:
        """Raises SlotError for length or magic."""
        if len(payload) != NOTICE_BYTES:
            raise SlotError("notification.length", f"{len(payload)} bytes", str(NOTICE_BYTES))
        magic, slot, epoch, transfer, generation = _NOTICE.unpack(payload)
        if magic != _NOTICE_MAGIC:
            raise SlotError("notification.magic", f"{magic:#010x}", f"{_NOTICE_MAGIC:#010x}")
        return PartNotice(epoch=epoch, transfer=transfer, slot=slot, generation=generation)


class Credit(NamedTuple):
    """The right to write the receiver's slot `slot` once. Generations of a slot start at 1 and only grow."""

    slot: int
    generation: int


class SlotState(enum.Enum):
    """The state of a receive slot."""

    FREE = "free"
    GRANTED = "granted"
    TAKEN = "taken"
    WITHHELD = "withheld"


class CreditTable:
    """The receiver's slots: state and generation of each. Misuse by its owner is an AssertionError."""

    def __init__(self, slots: int) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise ValueError(f"slots is {slots}, must be in 1..{MAX_SLOTS}")
        self._states = [SlotState.FREE] * slots
        self._generations = [0] * slots
        self._granted = 0

    @property
    def slots(self) -> int:
        """The number of slots."""
        return len(self._states)

    @property
    def granted(self) -> int:
        """Slots whose credit is out, or waits for its group, and is unspent as far as the receiver knows."""
        return self._granted

    @property
    def taken(self) -> int:
        """Slots whose part was announced and is not copied out yet."""
        return self._states.count(SlotState.TAKEN)

    @property
    def withheld(self) -> int:
        """Slots that are granted no more."""
        return self._states.count(SlotState.WITHHELD)

    def state(self, slot: int) -> SlotState:
        """The state of this slot."""
        return self._states[slot]

    def grant(self, slot: int) -> Credit:
        """The credit of a FREE slot."""
        self._move(slot, SlotState.FREE, SlotState.GRANTED)
        return self._next_credit(slot)

    def take(self, slot: int, generation: int) -> bool:
        """Takes a slot of which a notification says that it was written: False if that credit is not out."""
        if self._states[slot] is not SlotState.GRANTED or not self.generation_matches(slot, generation):
            return False
        self._move(slot, SlotState.GRANTED, SlotState.TAKEN)
        self._granted -= 1
        return True

    def generation_matches(self, slot: int, generation: int) -> bool:
        """Guard: only the newest credit of a slot is believed."""
        return self._generations[slot] == generation

    def give_back(self, slot: int) -> Credit:
        """The next credit of a TAKEN slot, nothing of whose content is needed any more."""
        self._move(slot, SlotState.TAKEN, SlotState.GRANTED)
        return self._next_credit(slot)

    def withhold(self, slot: int) -> None:
        """Keeps a TAKEN slot from being granted again: a write may still be on its way to it."""
        self._move(slot, SlotState.TAKEN, SlotState.WITHHELD)

    def check(self) -> None:
        """Recounts everything; for tests."""
        assert self._granted == self._states.count(SlotState.GRANTED)
        for state, generation in zip(self._states, self._generations, strict=True):
            assert (generation == 0) == (state is SlotState.FREE)

    def _next_credit(self, slot: int) -> Credit:
        self._generations[slot] += 1
        self._granted += 1
        return Credit(slot, self._generations[slot])

    def _move(self, slot: int, source: SlotState, target: SlotState) -> None:
        state = self._states[slot]
        assert state is source, f"slot {slot} is {state.value}, must be {source.value} to become {target.value}"
        self._states[slot] = target


class CreditPurse:
    """The sender's unspent credits, by rank of the receiver, oldest first.

    A credit is unspent until its part is posted: from then on the peer may have the notification and grant the slot
    anew, even before the courier reports the post done. A slot has one unspent credit at most, so neither the purse
    nor the gathers can outgrow the peer's slots.
    """

    def __init__(self, slots: int, ranks: int = 1) -> None:
        """slots: of each rank."""
        if not slots >= 1 or slots * ranks > MAX_SLOTS:
            raise ValueError(f"slots is {slots}, must be in 1..{MAX_SLOTS // ranks}")
        self._slots = slots
        self._newest = [0] * (slots * ranks)  # by slot, the newest generation seen
        self._credits: list[deque[Credit]] = [deque() for _ in range(ranks)]
        self._unspent: set[int] = set()  # slots whose credit is in the purse, or taken and not yet spent

    def __len__(self) -> int:
        return sum(map(len, self._credits))

    def has(self, rank: int) -> bool:
        """Whether there is one of this rank."""
        return bool(self._credits[rank])

    def add(self, credits: Iterable[Credit]) -> None:
        """Credits that the peer granted. Raises SlotError for a slot out of range, a generation that is not new, or a
        slot whose former credit is unspent."""
        for credit in credits:
            if not 0 <= credit.slot < len(self._newest):
                raise SlotError("credit.slot", credit.slot, f"in 0..{len(self._newest) - 1}")
            if credit.generation <= self._newest[credit.slot]:
                bound = f"greater than {self._newest[credit.slot]} for slot {credit.slot}"
                raise StaleCredit("credit.generation", credit.generation, bound)
            check_unsigned("credit.generation", credit.generation, 64)
            if credit.slot in self._unspent:
                raise StaleCredit("credit.slot", credit.slot, "a slot whose former credit was spent")
            self._newest[credit.slot] = credit.generation
            self._unspent.add(credit.slot)
            self._credits[self._rank(credit)].append(credit)

    def take(self, rank: int = 0) -> Credit:
        """Guard: a credit of this rank leaves the purse for the one part that may spend it. There must be one."""
        return self._credits[rank].popleft()

    def spend(self, credit: Credit) -> None:
        """The part of a taken credit is posted: the peer may grant the slot anew."""
        assert credit.slot in self._unspent, f"{credit} is spent twice"
        self._unspent.remove(credit.slot)

    def put_back(self, credit: Credit) -> None:
        """Returns a taken credit of which nothing was written."""
        assert credit.slot in self._unspent, f"{credit} was spent"
        self._credits[self._rank(credit)].appendleft(credit)

    def held(self) -> Sequence[Credit]:
        """A copy, by rank, in the order of use."""
        return tuple(credit for credits in self._credits for credit in credits)

    def check(self, taken: Iterable[Credit]) -> None:
        """Recounts everything, `taken` being those neither spent nor put back; for tests."""
        assert all(self._rank(credit) == rank for rank, credits in enumerate(self._credits) for credit in credits)
        slots = [credit.slot for credit in (*self.held(), *taken)]
        assert len(slots) == len(self._unspent)
        assert set(slots) == self._unspent

    def _rank(self, credit: Credit) -> int:
        return credit.slot // self._slots
