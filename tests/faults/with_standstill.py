"""`python with_standstill.py COMMAND ...`: kvferry's command line in this process, which stops itself, once, in the
midst of reaping a courier: it is killed, and its end not looked at yet. The deadline for that is short. A command is
`PYTHON -m kvferry WORDS`, as `Stack.start` puts it behind a prefix.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process

from kvferry.daemon.peers import session

STOP_SECONDS = 1.0

kill = Process.kill


def kill_and_stand_still(process: Process) -> None:
    Process.kill = kill  # type: ignore[method-assign]
    kill(process)
    # Once whoever reaps waits for the end.
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    session.STOP_SECONDS = STOP_SECONDS
    Process.kill = kill_and_stand_still  # type: ignore[method-assign]
    from kvferry.daemon.cli.main import main

    words = sys.argv[1:]
    sys.argv = ["kvferry", *words[words.index("kvferry") + 1 :]]
    sys.exit(main())
