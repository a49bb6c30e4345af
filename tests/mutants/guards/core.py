"""The cores: promises, locks, leases, single flight, who may say what of a request."""

from tests.mutants.guard import Guard

GUARDS: tuple[Guard, ...] = (
    Guard(
        "aux of the asked prefill daemon alone",
        "daemon/core/decode.py",
        "DecodeCore.aux",
        " or lease.prefill != prefill",
        "",
        ("tests/daemon/core",),
    ),
)
