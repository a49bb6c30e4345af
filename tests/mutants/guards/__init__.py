"""All guards, room by room."""

from tests.mutants.guard import Guard
from tests.mutants.guards import (
    blocks,
    caches,
    core,
    couriers,
    engine_resets,
    engines,
    files,
    first_tokens,
    memory,
    native,
    native_copies,
    other_loads,
    peers,
    places,
    protocol,
    ranks,
    sides,
    way_back,
)

GUARDS: tuple[Guard, ...] = (
    *core.GUARDS,
    *blocks.GUARDS,
    *protocol.GUARDS,
    *places.GUARDS,
    *caches.GUARDS,
    *couriers.GUARDS,
    *memory.GUARDS,
    *files.GUARDS,
    *native.GUARDS,
    *native_copies.GUARDS,
    *peers.GUARDS,
    *sides.GUARDS,
    *ranks.GUARDS,
    *engines.GUARDS,
    *other_loads.GUARDS,
    *engine_resets.GUARDS,
    *first_tokens.GUARDS,
    *way_back.GUARDS,
)
