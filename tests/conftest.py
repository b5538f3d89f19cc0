"""What holds for all tests: tiers (`tests/tiers.py`), budgets of examples, and what is told at the end."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import tiers
from tests.ray_cluster import FOLDERS, connected, running_cluster
from tests.warm_workers import search_path, warm_workers

# What these folders share (tiny models, rewards, games, engines) is imported by name, also by the workers of runs.
sys.path += [str(Path(__file__).parent / folder) for folder in ("pipeline", "runtime")]

# No deadlines for examples: speed is measured under benchmarks/, and a machine may stand still for a moment.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """Commands that start Ray for themselves have warm workers (tests/warm_workers.py)."""
    with warm_workers(*FOLDERS):
        yield


@pytest.fixture
def warm_commands(warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So have the commands that code under test starts."""
    monkeypatch.setenv("PYTHONPATH", search_path(*FOLDERS))


@pytest.fixture(scope="session")
def ray_cluster(warm: None) -> Iterator[str]:
    """The address of this process's Ray. Each run connects to it and leaves it."""
    with running_cluster() as address:
        yield address


@pytest.fixture(scope="module")
def local_ray(ray_cluster: str) -> Iterator[None]:
    """This process is connected to its Ray, as long as the tests of the file run."""
    with connected(ray_cluster):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=tiers.TIERS, help="the tests of `make test`, `make test-all` or `make soak`")


def pytest_configure(config: pytest.Config) -> None:
    tier = config.getoption("--tier")
    tiers.choose(tier)
    # A change is refused for what it broke and not for what was drawn: only `make soak` draws anew each time.
    settings.register_profile("roll", max_examples=tiers.examples(100), derandomize=not tiers.is_soak(), **COMMON)
    settings.load_profile("roll")
    missing = tiers.missing() if tier == "all" else []
    if missing:
        lines = [f"  {name} ({tiers.INSTALL_HINTS.get(name, 'make venv-for-all-tests')})" for name in missing]
        raise pytest.UsageError("\n".join(["`make test-all` leaves no gap, and this machine lacks:", *lines]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    if tier == "soak":
        for item in items:
            item.add_marker(pytest.mark.timeout(4 * 3600))
    left_out = [item for item in items if not tiers.runs_in(tier, _smallest_tier(item))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        tiers.need(*marker.args)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what was skipped for want of a package, and where the time went."""
    gaps = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    gaps = Counter({reason: count for reason, count in gaps.items() if reason.startswith(tiers.MISSING)})
    for reason, count in sorted(gaps.items()):
        terminalreporter.write_line(f"{count} skipped, {reason}")
    if config.getoption("--tier") is None:
        return
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("seconds per file")
    for path, spent in sorted(seconds.items(), key=lambda each: -each[1]):
        if spent >= 1:
            terminalreporter.write_line(f"{spent:7.1f} {path}")
    terminalreporter.write_line(f"{sum(seconds.values()):7.1f} in all")


def _smallest_tier(item: pytest.Item) -> str:
    """The closest mark wins, so that a test may leave the tier of its file, and an example that of its test. Property
    tests are soaked as well."""
    own = [marker for marker in item.own_markers if marker.name == "tier"]  # those of the example come last
    marker = own[-1] if own else item.get_closest_marker("tier")
    if marker is not None:
        return marker.args[0]
    is_property = hasattr(getattr(item, "obj", None), "hypothesis")
    return "soak" if is_property and item.config.getoption("--tier") == "soak" else "quick"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped."""
    return str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
