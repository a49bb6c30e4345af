"""relay.py ONE OTHER: carries frames between two interfaces, each delayed; its standard input says how long.

A line there is a number of seconds, from then on; the answer is the line. Raw packet sockets, whose frames have the
kernel's virtio header before them: offloaded checksums and segments that were never cut pass as they are.
"""

from __future__ import annotations

import heapq
import os
import select
import socket
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, ETH_P_ALL, OUTGOING = 263, 15, 0x0003, 4
FRAME_BYTES = 10 + 14 + 65536
MAX_FRAMES = 8192  # on their way; more are lost, as on a wire


def opened(interface: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    made.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    made.bind((interface, 0))
    made.setblocking(False)
    return made


def main() -> int:
    ends = [opened(interface) for interface in sys.argv[1:3]]
    delay = 0.0
    number = 0
    coming: list[tuple[float, int, socket.socket, bytes]] = []
    print("ready", flush=True)
    while True:
        wait = max(0.0, coming[0][0] - time.monotonic()) if coming else None
        ready, _, _ = select.select([*ends, sys.stdin], [], [], wait)
        if sys.stdin in ready:
            line = os.read(sys.stdin.fileno(), 64)
            if not line:
                return 0
            delay = float(line)
            print(line.decode().strip(), flush=True)
        for end, other in (ends, reversed(ends)):
            if end not in ready:
                continue
            for _ in range(64):
                try:
                    frame, (_, _, kind, _, _) = end.recvfrom(FRAME_BYTES)
                except BlockingIOError:
                    break
                if kind != OUTGOING and len(coming) < MAX_FRAMES:
                    number += 1
                    heapq.heappush(coming, (time.monotonic() + delay, number, other, frame))
        while coming and coming[0][0] <= time.monotonic():
            _, _, other, frame = heapq.heappop(coming)
            try:
                other.send(frame)
            except (BlockingIOError, OSError):
                continue  # lost


if __name__ == "__main__":
    sys.exit(main())
