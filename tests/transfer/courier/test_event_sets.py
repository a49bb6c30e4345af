"""The epoll sets by which a courier hears of bytes: what counts as one."""

import select
import socket

from kvferry.transfer.courier.main import ucx_event_sets


def test_an_epoll_set_that_another_one_watches_is_found_and_tells_of_bytes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, select.epoll() as inner, select.epoll() as outer:
        inner.register(ours, select.EPOLLIN)
        assert inner.fileno() not in ucx_event_sets()
        outer.register(inner, 0)
        found = ucx_event_sets()
        assert inner.fileno() in found
        assert outer.fileno() not in found
        assert select.select([inner], [], [], 0)[0] == []
        theirs.send(b"x")
        assert select.select([inner], [], [], 0)[0] == [inner]
