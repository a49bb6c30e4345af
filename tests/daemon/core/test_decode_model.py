"""Random workers, prefill daemons, tiers and failures against the decode core; every page's content is tracked, on the
device and on the host."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.daemon.core.decode_machine import CoreMachine

TestDecodeCore = CoreMachine.TestCase
TestDecodeCore.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


class LongCoreMachine(CoreMachine):
    """Another class: a machine's test case is one object."""


TestDecodeCoreLong = pytest.mark.nightly(pytest.mark.timeout(1800)(LongCoreMachine.TestCase))
TestDecodeCoreLong.settings = settings(
    max_examples=600, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
