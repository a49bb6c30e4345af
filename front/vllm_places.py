"""The vLLM servers a front end is before, as its flags name them: addresses, or a name of DNS that has several."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvferry import addresses
from kvferry.proto.limits import MAX_NAME_CHARS

MAX_DP_RANKS = 256
DP_RANK = "{dp_rank}"
ADDRESS = "{address}"
DNS = "dns+http://"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")  # what an address has, and a daemon's name may not


class Place(NamedTuple):
    """A server, or one of its data-parallel ranks. With a URL of dns+http: one for each address that its name has."""

    url: str
    daemon: str = ""  # name of a prefill server's
    dp_rank: int | None = None
    name: str = ""  # the URL with the name of DNS that has it
    daemon_address: str = ""  # HOST:PORT of a decode server's; empty: it is not asked for its health

    @property
    def told(self) -> str:
        """The URL by which it was named at the start."""
        return self.name or self.url

    @property
    def label(self) -> str:
        return self.url if self.dp_rank is None else f"{self.url} rank {self.dp_rank}"

    @property
    def is_name(self) -> bool:
        return self.url.startswith(DNS)

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The name that is looked up, and the servers' port."""
        return addresses.split(self.url.removeprefix(DNS))

    def at(self, address: str) -> Place:
        """The server at one of the name's addresses."""
        host = f"[{address}]" if ":" in address else address
        daemon = self.daemon.replace(ADDRESS, _NOT_IN_NAMES.sub("-", address))
        beside = self.daemon_address.replace(ADDRESS, host)
        return Place(f"http://{host}:{self.host_and_port[1]}", daemon, self.dp_rank, self.url, beside)


def parse_prefill(text: str) -> tuple[Place, ...]:
    """NAME=URL, or NAME-{dp_rank}=URL,RANKS: each rank's place. ValueError says what is wrong."""
    name, _, url = text.partition("=")
    places = _servers(url or text)
    names = [name if place.dp_rank is None else name.replace(DP_RANK, str(place.dp_rank)) for place in places]
    fit = all(1 <= len(each) <= MAX_NAME_CHARS and "/" not in each for each in names)
    if not url or not fit or len(set(names)) < len(places):
        ranks = f", for each of its {len(places)} ranks another by {DP_RANK}" if len(places) > 1 else ""
        raise ValueError(f"must be NAME=URL with the name of the prefill daemon{ranks}, got {text!r}")
    if places[0].is_name and ADDRESS not in name:
        raise ValueError(f"must have {ADDRESS} in NAME, since each server of {DNS} has a daemon, got {text!r}")
    return tuple(place._replace(daemon=each) for place, each in zip(places, names, strict=True))


def parse_decode(text: str) -> tuple[Place, ...]:
    """URL or URL,RANKS, or DAEMON=URL with the address of the daemon beside it, which has {dp_rank} where there are
    ranks and {address} where the URL has a name of DNS. ValueError says what is wrong."""
    daemon, equals, url = text.partition("=")
    if not equals or "://" in daemon:
        return _servers(text)
    places = _servers(url)
    beside = [daemon if place.dp_rank is None else daemon.replace(DP_RANK, str(place.dp_rank)) for place in places]
    if not all(_is_dialled(each, places[0].is_name) for each in beside) or len(set(beside)) < len(places):
        ranks = f", for each of its {len(places)} ranks another by {DP_RANK}" if len(places) > 1 else ""
        raise ValueError(f"must have its daemon's HOST:PORT{ranks} before =, got {text!r}")
    if places[0].is_name and ADDRESS not in daemon:
        raise ValueError(f"must have {ADDRESS} before =, since each server of {DNS} has a daemon, got {text!r}")
    return tuple(place._replace(daemon_address=each) for place, each in zip(places, beside, strict=True))


def _is_dialled(text: str, is_name: bool) -> bool:
    try:
        host, port = addresses.split(text.replace(ADDRESS, "h") if is_name else text)
    except ValueError:
        return False
    return port > 0 and "{" not in host


def _servers(text: str) -> tuple[Place, ...]:
    """URL, or URL,RANKS: the place of each data-parallel rank. ValueError says what is wrong."""
    url, comma, ranks = text.partition(",")
    url = url.rstrip("/")
    if url.startswith(DNS):
        try:
            addresses.split(url.removeprefix(DNS))
        except ValueError as error:
            raise ValueError(f"must have {error} behind {DNS}, got {text!r}") from error
    elif not url.startswith(("http://", "https://")):
        raise ValueError(f"must be a URL, http://HOST:PORT or {DNS}NAME:PORT, got {text!r}")
    if not comma:
        return (Place(url),)
    if not ranks.isascii() or not ranks.isdigit() or not 1 <= int(ranks[:9]) <= MAX_DP_RANKS:
        raise ValueError(f"must be URL,RANKS with 1 to {MAX_DP_RANKS} data-parallel ranks, got {text!r}")
    return tuple(Place(url, dp_rank=rank) for rank in range(int(ranks)))
