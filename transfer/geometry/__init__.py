"""Where the bytes of pages lie: what daemons, workers and connectors share. No I/O."""
