"""The way back: a prefill daemon fetches pages that it lacks from the decode daemon that asks it for the rest. Core: no
I/O. docs/internals/way-back.md tells the protocol."""
