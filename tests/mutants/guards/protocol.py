"""Slots, credits, coverage, digests' agreement: what is believed of a part."""

from tests.mutants.guard import Guard

GUARDS: tuple[Guard, ...] = ()
