"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadlines, as the machine may stand still for a moment. The same examples each time, so that a change is refused
# for what it does; `derandomize=False` tries others.
settings.register_profile("roll", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("roll")
