"""Prints the transports that NIXL's own UCX finds here: its components with at least one memory domain. In a process of
its own, since it loads UCX's modules.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys

NAME, COUNT = 1, 2  # UCT_COMPONENT_ATTR_FIELD_...
PACKAGES = ("kvferry_nixl/nixl_cu13", "nixl_cu13", "nixl_cu12")


class ComponentAttributes(ctypes.Structure):
    """uct_component_attr_t, as far as it is asked for; padded for what later versions add."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 16),
        ("md_resource_count", ctypes.c_uint),
        ("rest", ctypes.c_uint64 * 32),
    )


def main() -> int:
    library = _library()
    if library is None:
        print("NIXL is not installed, or its UCX is not where it was", file=sys.stderr)
        return 1
    uct = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    components, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_uint()
    status = uct.uct_query_components(ctypes.byref(components), ctypes.byref(count))
    if status:
        print(f"uct_query_components gives {status}", file=sys.stderr)
        return 1
    for index in range(count.value):
        attributes = ComponentAttributes(field_mask=NAME | COUNT)
        status = uct.uct_component_query(ctypes.c_void_p(components[index]), ctypes.byref(attributes))
        if status == 0 and attributes.md_resource_count:
            print(attributes.name.decode())
    return 0


def _library() -> str | None:
    for folder in sys.path:
        for package in PACKAGES:
            if found := glob.glob(os.path.join(folder, f"{package}.libs", "libuct-*")):
                return found[0]
    return None


if __name__ == "__main__":
    sys.exit(main())
