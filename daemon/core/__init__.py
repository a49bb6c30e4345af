"""The cores: state machines of both roles, fed with events and a clock. No I/O, and nothing of the floors above.

`decode` and `prefill` are the two roles' requests, `cache` what a role holds; `effects` is the only way out of here.
"""
