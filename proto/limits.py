"""Bounds of the wire contract: what is beyond them is refused, by whichever side meets it first. And its metadata."""

REQUEST_ID_BYTES = 16
MAX_ATTEMPT = 1 << 16
MAX_NAME_CHARS = 128
MAX_CAPABILITIES = 64  # of a daemon's Hello
MAX_CAPABILITY_CHARS = 64
INCARNATION_BYTES = 16
MAX_REASON_CHARS = 1024
MAX_AUX_BYTES = 64 * 1024
MAX_METADATA_BYTES = 64 * 1024  # of a courier
MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # of a gRPC message: 1 Mi tokens at page 16 are 2 MiB of digests
ENDED_IN_ORDER = (("kvferry-ended", "in-order"),)  # behind a worker's session that a daemon ends at its own end
ERROR_METADATA = "kvferry-error-bin"  # behind an engine's call that failed: a common.proto Error
MAX_PRIORITY = 1000  # of a request; the least is -MAX_PRIORITY
MAX_LOOKED_UP_PAGES = 1 << 14  # of a look-up among daemons: half a MiB of digests
