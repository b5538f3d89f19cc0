"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadlines for examples: speed is measured under benchmarks/, and a machine may stand still for a moment.
settings.register_profile("roll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("roll")
