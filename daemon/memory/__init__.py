"""The memory of pools and of the host tier, and every copy from it and to it.

`interface` says what the floors above ask of it.
"""
