"""A stack's record of its processes' words."""

from __future__ import annotations

from kvferry.daemon.cli.stack import Stack

WORDS = "echo before >&2; echo 'ready: nobody 127.0.0.1:1'; sleep 0.5; echo after, longer than what it could hide >&2"


def test_the_log_has_both_streams_in_order() -> None:
    with Stack() as stack:
        process = stack.start("talker", [], prefix=["sh", "-c", WORDS])
        assert stack.ready(process) == "127.0.0.1:1"
        assert process.popen.wait(10) == 0
        assert process.tail().splitlines() == [
            "before",
            "ready: nobody 127.0.0.1:1",
            "after, longer than what it could hide",
        ]
