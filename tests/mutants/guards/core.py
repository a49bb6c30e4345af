"""The cores: promises, locks, leases, single flight, who may say what of a request."""

from tests.mutants.guard import Guard
from tests.mutants.guards import core_decode

GUARDS: tuple[Guard, ...] = (*core_decode.GUARDS,)
