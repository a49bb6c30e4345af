"""Random prefill workers, decode daemons and failures against the prefill core; every page's content is tracked."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.daemon.core.prefill_machine import PrefillMachine

TestPrefillCore = PrefillMachine.TestCase
TestPrefillCore.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


class LongPrefillMachine(PrefillMachine):
    """Another class: a machine's test case is one object."""


TestPrefillCoreLong = pytest.mark.nightly(pytest.mark.timeout(1800)(LongPrefillMachine.TestCase))
TestPrefillCoreLong.settings = settings(
    max_examples=600, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
