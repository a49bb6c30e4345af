"""Moving pages between daemons: where bytes lie, the protocol, the couriers that write, and what outlives a daemon."""
