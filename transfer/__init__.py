"""Moving pages between daemons: geometry, shared memory, couriers, slots, and the state machines of both ends."""
