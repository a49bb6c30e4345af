"""A side is one role of a daemon: its core, its workers and tiers, and the carrying out of its core's effects."""
