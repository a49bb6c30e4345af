"""The geometry of pages, where their bytes lie: what daemons, workers and connectors share. No I/O."""
