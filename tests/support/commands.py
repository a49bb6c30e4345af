"""The command line, in this process: to start one takes longer than all that most commands do."""

from __future__ import annotations

import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from unittest.mock import patch

from kvferry.daemon.cli.main import main


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def kvferry(*words: str, **environment: str) -> Done:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err, patch.dict(os.environ, environment):
        try:
            status = main(words)
        except SystemExit as end:  # argparse's; it has printed why
            status = int(end.code or 0)
    return Done(status, out.getvalue(), err.getvalue())
