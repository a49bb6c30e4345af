"""The library by which an engine uses its daemon: a session over the Unix socket, and the pool's memory mapped.

The reference workers and the connectors stand on it. It shares with the daemon what `transfer.geometry` and
`transfer.mapping` have, and no other code.
"""
