"""The slot protocol and the state machines of both its ends. No I/O."""
