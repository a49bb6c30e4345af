"""HOST:PORT, as settings, flags and commands take it: to listen on, or to dial."""

from __future__ import annotations

import ipaddress
import re

FORM = "HOST:PORT with a port of 0 to 65535"
# A host is a name, an address of IPv4, or one of IPv6 in brackets. What separates addresses in lists is in none.
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\s,;=/@\[\]]+)\]|(?P<host>[^\s:,;=/@\[\]]+)):(?P<port>[0-9]{1,5})")


def split(text: str) -> tuple[str, int]:
    """(host, port), the host without brackets. ValueError, which says what form it is to have."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535 or not text.isprintable():
        raise ValueError(FORM + (" (of IPv6: [HOST]:PORT)" if text.count(":") > 1 else ""))
    if found["v6"] is not None:
        try:
            ipaddress.IPv6Address(found["v6"])
        except ValueError as error:
            raise ValueError(f"{FORM}: {error}") from error
    return found["v6"] or found["host"], int(found["port"])
