"""Names of certificates: which may be on the list of peers, and which settings of TLS go together. No I/O."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence

MAX_TLS_PEERS = 256
MAX_TLS_NAME_CHARS = 2048  # of a SPIFFE id

_DNS = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s,]+")


def parse_tls_peers(value: object) -> tuple[str, ...]:
    """The names in a list, or separated by commas. ValueError names what is no name, and the bound."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} is no list of names")
    # A flag that is repeated gives a list whose entries may be lists again.
    words = [word.strip() for entry in value for word in str(entry).split(",")]
    names = tuple(dict.fromkeys(normal_name(word) for word in words if word))
    if len(names) > MAX_TLS_PEERS:
        raise ValueError(f"{len(names)} names are given; the bound is {MAX_TLS_PEERS}")
    return names


def normal_name(text: str) -> str:
    """The name in the form that is compared: exact, but names of DNS in small letters and addresses as Python writes
    them."""
    if len(text) > MAX_TLS_NAME_CHARS:
        raise ValueError(f"name {text[:64]!r}... has {len(text)} characters; the bound is {MAX_TLS_NAME_CHARS}")
    if _URI.fullmatch(text):
        return text
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    if len(text) > 253 or not _DNS.fullmatch(text):
        raise ValueError(f"name {text[:64]!r} is no name of DNS, no URI (spiffe://...) and no IP address")
    return text.lower()


def kind_of(name: str) -> str:
    """ "uri", "ip" or "dns": what a normal name is by its form."""
    if _URI.fullmatch(name):
        return "uri"
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "dns"
    return "ip"


def check_tls(
    files: Mapping[str, str], allowed: Sequence[str], *, serves_peers: bool, dialled: Iterable[tuple[str, str]]
) -> None:
    """`files`: by flag, empty where not given. `dialled`: (flag, host) of the daemons that are dialled. ValueError
    names the settings that do not go together.
    """
    given = [flag for flag, path in files.items() if path]
    missing = [flag for flag, path in files.items() if not path]
    if given and missing:
        raise ValueError(f"{' and '.join(given)} without {' and '.join(missing)}: TLS takes all of {', '.join(files)}")
    if not given:
        if allowed:
            raise ValueError(f"--tls-peer is {allowed[0]!r}, but there is no TLS: it takes {', '.join(files)}")
        return
    if serves_peers and not allowed:
        raise ValueError(
            "--tls-peer is not given: name the decode daemons whose certificates may open a session, "
            "each by a name that it has (DNS, or a URI like spiffe://...)"
        )
    for flag, host in dialled:
        if allowed and normal_name(host) not in allowed:
            raise ValueError(
                f"{flag} dials {host!r}, which is not among --tls-peer {', '.join(allowed[:8])}: a prefill daemon's "
                "certificate must have the name by which it is dialled, and the list, where there is one, must have it"
            )
