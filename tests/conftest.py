"""What every test can count on: its needs from the system are met, and a factor says how hard to work.

It holds no fixtures of any one room; those are next to that room's tests.
"""

import os
import signal
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.suites import REQUIREMENTS

# A run in the background inherits that SIGINT is ignored, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests end before the JVM's second compiler has paid for itself; this is for every JVM that they or Spark start.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

SOAK = int(os.environ.get("HEADRACE_SOAK") or 1)

# Tests never judge by the clock, so neither may Hypothesis.
usual = settings(settings.get_profile("default"), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", usual)
settings.register_profile("ci", usual, derandomize=True, print_blob=True)
settings.register_profile("soak", usual, max_examples=usual.max_examples * SOAK, print_blob=True)
settings.load_profile("soak" if SOAK > 1 else "ci" if os.environ.get("CI") == "true" else "default")

NOT_RUN = pytest.StashKey[dict[str, Counter[str]]]()


@pytest.fixture(scope="session")
def soak() -> int:
    """How many times more than usual to kill, fuzz and load; 1 but for `make soak`."""
    return SOAK


def needs_of(item: pytest.Item) -> list[str]:
    return [need for marker in item.iter_markers("needs") for need in marker.args]


@pytest.hookimpl(trylast=True)  # after the user's own choice with -k or -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes out the tests whose needs are not met, and keeps what they were."""
    needs = {need for item in items for need in needs_of(item)}
    if unknown := needs - REQUIREMENTS.keys():
        raise pytest.UsageError(f"needs({', '.join(unknown)}): tests/suites.py has no such requirement")
    unmet = {need for need in needs if REQUIREMENTS[need].find() is None}
    if not unmet:
        return
    left_out = [item for item in items if not unmet.isdisjoint(needs_of(item))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if unmet.isdisjoint(needs_of(item))]
    config.stash[NOT_RUN] = {
        need: Counter(item.nodeid.partition("::")[0] for item in left_out if need in needs_of(item))
        for need in sorted(unmet)
    }


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """Ends with the suites that did not run, which is a failure in CI; a skipped test is one anywhere."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    not_run = session.config.stash.get(NOT_RUN, {})
    skipped = reporter.stats.get("skipped", [])
    if skipped or (not_run and os.environ.get("CI") == "true"):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    yield
    for need, files in not_run.items():
        suites = ", ".join(f"{file} ({tests})" for file, tests in sorted(files.items()))
        reporter.write_line(f"!!! DID NOT RUN: {suites}: {REQUIREMENTS[need].missing}", red=True, bold=True)
    if skipped:
        names = ", ".join(sorted(report.nodeid for report in skipped))
        reporter.write_line(f"!!! SKIPPED, which only needs(...) may cause: {names}", red=True, bold=True)
