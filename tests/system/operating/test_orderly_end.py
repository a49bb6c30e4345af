"""A daemon that is told to end says so, and its worker ends with it without an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import start_replicas
from tests.support.stacks import SmallSystem


def logged(path: str, part: str) -> list[tuple[str, str]]:
    """(level, message) of each line that a module of `part` logged: one format for all."""
    form = rf"^\d{{4}}-\d\d-\d\d [\d:,]+ (\w+) kvferry\.{part}[\w.]*: (.*)$"
    return re.findall(form, Path(path).read_text(), re.MULTILINE)


@pytest.mark.timeout(60)
def test_a_daemon_that_ends_in_order_and_its_worker() -> None:
    with Stack() as stack:
        prefill = start_replicas(stack, SmallSystem(decodes=0))[0][0]
        assert stack.stop(prefill.daemon) == 0
        assert prefill.worker.popen.wait(20) == 1  # so that whoever watches it starts it again
        daemon = logged(prefill.daemon.log_path, "daemon")
        assert ("INFO", "SIGTERM: draining, 0 requests run") in daemon
        assert daemon[-1] == ("INFO", "ended")
        assert not [line for line in daemon if line[0] not in ("INFO", "DEBUG")]
        worker = [line for line in logged(prefill.worker.log_path, "workers") if line[0] != "INFO"]
        assert worker == [("WARNING", "the daemon has ended: the worker ends, too")]
        assert "Traceback" not in Path(prefill.worker.log_path).read_text()


@pytest.mark.timeout(60)
def test_a_daemon_that_is_killed_is_an_error_of_its_worker() -> None:
    with Stack() as stack:
        prefill = start_replicas(stack, SmallSystem(decodes=0))[0][0]
        stack.kill(prefill.daemon)
        assert prefill.worker.popen.wait(20) == 1
        levels = [level for level, _ in logged(prefill.worker.log_path, "workers")]
        assert "ERROR" in levels
