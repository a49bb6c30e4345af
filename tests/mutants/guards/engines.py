"""The engine's side: client, connectors, front end, reference workers."""

from tests.mutants.guard import Guard

GUARDS: tuple[Guard, ...] = ()
