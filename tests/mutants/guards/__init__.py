"""All guards, room by room."""

from tests.mutants.guard import Guard
from tests.mutants.guards import core, engines, memory, native, peers, protocol

GUARDS: tuple[Guard, ...] = (
    *core.GUARDS,
    *protocol.GUARDS,
    *memory.GUARDS,
    *native.GUARDS,
    *peers.GUARDS,
    *engines.GUARDS,
)
