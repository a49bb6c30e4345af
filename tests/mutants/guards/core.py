"""The cores: promises, locks, leases, single flight, who may say what of a request."""

from tests.mutants.guard import Guard
from tests.mutants.guards import core_decode, core_pages, core_prefill

GUARDS: tuple[Guard, ...] = (*core_decode.GUARDS, *core_prefill.GUARDS, *core_pages.GUARDS)
