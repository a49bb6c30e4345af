"""Sessions, handshakes, couriers, workers' ends, deadlines that mean death."""

from tests.mutants.guard import Guard

GUARDS: tuple[Guard, ...] = ()
