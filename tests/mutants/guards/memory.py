"""Pools and the host tier: clearing, epochs, index order, checksums, locks of files."""

from tests.mutants.guard import Guard

GUARDS: tuple[Guard, ...] = ()
