"""The end at the daemon of a request whose work has failed: the same for both roles."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvferry.client.client import DaemonClient
from kvferry.client.requests import NotOpened, RequestFailed, RequestName
from kvferry.proto import common_pb2
from kvferry.waiting import complete
from kvferry.workers.models.interface import WrongPage

_log = logging.getLogger(__name__)


@asynccontextmanager
async def aborted_on_error(client: DaemonClient, name: RequestName) -> AsyncIterator[None]:
    """Whatever the block raises, what it opened is over at the daemon before that goes on. RequestFailed in place of
    WrongPage."""
    try:
        yield
    except NotOpened:
        raise  # the name may be that of a request that runs: it is not this call's to abort
    except WrongPage as error:
        _log.error("request %s: %s", name, error)  # the request may be answered all the same, by another worker
        await complete(client.abort(name, str(error)))
        raise RequestFailed(common_pb2.ERROR_INTERNAL, str(error)) from error
    except BaseException as error:
        await complete(client.abort(name, str(error) or type(error).__name__))
        raise
