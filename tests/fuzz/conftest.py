"""Sessions that are watched and logs that are silent for every fuzz target."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions are watched; what hostile input makes daemons warn of is not shown. What `watch_sessions` sets is as it
    was for the tests behind these."""
    from kvferry.daemon.peers import session
    from kvferry.daemon.sides import workers
    from tests.fuzz import stage

    monkeypatch.setattr(session, "CourierLink", session.CourierLink)
    monkeypatch.setattr(session.Session, "_reason", session.Session._reason)
    monkeypatch.setattr(workers, "SETTLE_SECONDS", workers.SETTLE_SECONDS)
    stage.watch_sessions()
    logs = [logging.getLogger(name) for name in ("kvferry", "asyncio")]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    yield
    for log, level in zip(logs, before, strict=True):
        log.setLevel(level)
