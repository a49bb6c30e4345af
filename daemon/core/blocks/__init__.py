"""An engine's own blocks, as pages of requests: what the host tier gives them, and takes from them. Core: no I/O."""
