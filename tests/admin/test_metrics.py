"""Metrics from a real log, bus and service: every counter has a name, every name a value."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headrace.admin import names
from headrace.admin.metrics import registry
from tests.admin.figures import RealStatistics


@pytest.fixture
def statistics(tmp_path: Path) -> Iterator[RealStatistics]:
    real = RealStatistics(tmp_path)
    yield real
    real.close()


def value(metrics: CollectorRegistry, metric: names.Metric, **labels: str) -> float | None:
    return metrics.get_sample_value(metric.name, labels)


def test_every_counter_of_the_log_the_bus_and_connections_has_a_metric(statistics: RealStatistics) -> None:
    assert set(names.LOG) == set(statistics.log.stats()) - {"topics"}  # which the bus tells, too
    assert {*names.BUS, "delays"} == set(statistics.bus.stats())
    assert set(names.CONNECTION_COUNTERS) == set(statistics.service.counters())


def test_every_metric_that_is_named_is_there(statistics: RealStatistics) -> None:
    lines = generate_latest(registry(statistics)).decode().splitlines()
    sampled = {re.split(r"[ {]", line)[0] for line in lines if line.startswith("headrace_")}
    histogram = {f"{names.DELAYS.name}_{part}" for part in ("bucket", "count", "sum")}
    assert sampled == {metric.name for metric in names.ALL if metric is not names.DELAYS} | histogram


def test_values_are_those_of_the_moment_of_asking(statistics: RealStatistics) -> None:
    metrics = registry(statistics)
    assert value(metrics, names.BUS["published"], protocol="blipmq") == 0
    for i in range(3):
        statistics.bus.publish(f"topic.{i}", b"12345", protocol=1)
    assert value(metrics, names.BUS["published"], protocol="blipmq") == 3
    assert value(metrics, names.BUS["published_bytes"], protocol="blipmq") == 15
    assert value(metrics, names.BUS["published"], protocol="felix") == 0
    assert value(metrics, names.BUS["topics"]) == 3
    assert value(metrics, names.LOG["appended_offset"]) == 3
    assert value(metrics, names.CONNECTIONS, protocol="blipmq") == 2
    assert value(metrics, names.MAX_CONNECTIONS, protocol="blipmq") == 5
    assert value(metrics, names.CONNECTION_COUNTERS["opened"], protocol="blipmq") == 7
    assert value(metrics, names.CONNECTION_COUNTERS["bytes_in"], protocol="blipmq") == 1234
    assert value(metrics, names.SESSION_EVENTS, protocol="blipmq", event="hellos") == 3
    assert value(metrics, names.START_TIME) == 1_000_000.5
    info = {"version": "1.2.3", "node": "edge", "log": statistics.log.id_text, "loop": "uvloop"}
    assert value(metrics, names.INFO, **info) == 1


def test_delays_of_deliveries_are_a_histogram(statistics: RealStatistics) -> None:
    metrics = registry(statistics)
    member = statistics.bus.subscribe("#", protocol=1).join(None, -1, 1)
    begin = 4_000_000_000_000_000  # later than the clock, which the log never turns back
    for _ in range(4):
        statistics.bus.publish("t", b"", now=begin)
    for delay in (0, 63, 64, 200_000_000):  # µs; the last one is beyond every bound
        assert member.receive(begin + delay) is not None

    def counted(part: str, **labels: str) -> float | None:
        return metrics.get_sample_value(f"{names.DELAYS.name}_{part}", {"protocol": "blipmq", **labels})

    assert counted("bucket", le="6.4e-05") == 2
    assert counted("bucket", le="0.000128") == counted("bucket", le=repr(names.DELAY_BOUNDS[-1])) == 3
    assert counted("bucket", le="+Inf") == counted("count") == 4
    assert counted("sum") == pytest.approx(200.000127)


def test_readiness_and_a_full_log_are_visible(statistics: RealStatistics) -> None:
    metrics = registry(statistics)
    assert value(metrics, names.READY) == 1
    assert value(metrics, names.LOG_FULL) == 0
    assert value(metrics, names.LOG_FAILED) == 0
    statistics.reasons = ["the log is full"]
    statistics.full = "no space left"
    assert value(metrics, names.READY) == 0
    assert value(metrics, names.LOG_FULL) == 1


def test_a_gateway_that_just_starts_has_fewer_metrics_and_no_error(statistics: RealStatistics) -> None:
    statistics.opened = False
    metrics = registry(statistics)
    assert value(metrics, names.LOG["appended_offset"]) is None
    assert value(metrics, names.START_TIME) == 1_000_000.5


def test_the_number_of_samples_does_not_grow_with_topics(statistics: RealStatistics) -> None:
    metrics = registry(statistics)
    before = len(generate_latest(metrics).splitlines())
    for i in range(500):
        statistics.bus.publish(f"topic.{i}", b"")
    assert len(generate_latest(metrics).splitlines()) == before


def test_two_gateways_in_one_process_have_registries_of_their_own(
    statistics: RealStatistics, tmp_path: Path
) -> None:
    other = RealStatistics(tmp_path / "other")
    other.bus.publish("a", b"x", protocol=1)
    assert value(registry(statistics), names.BUS["published"], protocol="blipmq") == 0
    assert value(registry(other), names.BUS["published"], protocol="blipmq") == 1
    other.close()
