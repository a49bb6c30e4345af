"""Versions of the wire contract.

A release speaks its own protocol to other daemons, and the one before: a pair is upgraded one daemon after the other. A
worker and its daemon are of one release.
"""

PROTOCOL = 1  # between daemons
PROTOCOL_MIN = 1  # the oldest that another daemon may speak
WORKER_PROTOCOL = 1
