"""C++: the tree, the page pool, digests, orders of GPU streams."""

from tests.mutants.guard import Guard

GUARDS: tuple[Guard, ...] = ()
