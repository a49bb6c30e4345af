"""All guards, room by room."""

from tests.mutants.guard import Guard
from tests.mutants.guards import core, engines, files, memory, native, peers, protocol

GUARDS: tuple[Guard, ...] = (
    *core.GUARDS,
    *protocol.GUARDS,
    *memory.GUARDS,
    *files.GUARDS,
    *native.GUARDS,
    *peers.GUARDS,
    *engines.GUARDS,
)
