"""The network interface that owns an address: UCX is told names of interfaces, people configure addresses."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40  # a 16-byte name, then a union whose first 16 bytes are a sockaddr_in
_MAX_ADDRESSES = 1024
_IF_INET6 = Path("/proc/net/if_inet6")


class InterfaceError(ValueError):
    """No interface of this machine has the address."""


def interface_of(address: Address) -> str:
    """The name of the interface that owns the address; `lo` for every loopback one. Raises InterfaceError."""
    if address.is_loopback:
        return "lo"
    owners = interface_addresses()
    if address in owners:
        return owners[address]
    known = ", ".join(f"{each} ({name})" for each, name in owners.items() if not each.is_loopback) or "none"
    raise InterfaceError(f"bind_host {address} belongs to no network interface of this host; addresses here: {known}")


def interface_addresses() -> dict[Address, str]:
    """Every address of this machine's interfaces that are up, secondary ones too, and the interface that owns it."""
    return {**_ipv4_addresses(), **_ipv6_addresses()}


def _ipv4_addresses() -> dict[Address, str]:
    room = array.array("B", bytes(_IFREQ_BYTES * _MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iL", len(room), room.buffer_info()[0])  # struct ifconf
        used, _ = struct.unpack("iL", fcntl.ioctl(any_socket, SIOCGIFCONF, request))
    rows = room.tobytes()
    owners: dict[Address, str] = {}
    for start in range(0, used, _IFREQ_BYTES):
        label = rows[start : start + 16].split(b"\0", 1)[0].decode()
        # A secondary address may carry a label such as eth0:1.
        owners[ipaddress.IPv4Address(rows[start + 20 : start + 24])] = label.partition(":")[0]
    return owners


def _ipv6_addresses() -> dict[Address, str]:
    try:
        lines = _IF_INET6.read_text().splitlines()
    except FileNotFoundError:  # a kernel without IPv6
        return {}
    rows = (line.split() for line in lines)
    return {ipaddress.IPv6Address(bytes.fromhex(row[0])): row[5] for row in rows}
