"""Metrics for Prometheus, made when they are asked for from counters that are kept anyway. Knows the names
from names.py and the figures from statistics.py, and nothing of HTTP."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.admin import names
from headrace.admin.statistics import (
    CarrierFigures,
    Figures,
    ListenerFigures,
    LogFigures,
    SinkFigures,
    Statistics,
)


def registry(statistics: Statistics) -> CollectorRegistry:
    """A registry of its own, with the gateway and the process in it."""
    made = CollectorRegistry()
    made.register(GatewayCollector(statistics))
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    GCCollector(registry=made)
    return made


class GatewayCollector(Collector):
    """All that names.py lists."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def describe(self) -> Iterator[Metric]:
        """The names alone, so that registering asks a gateway that just starts for nothing."""
        for metric in names.ALL:
            yield _family(metric)

    def collect(self) -> Iterator[Metric]:
        figures = self._statistics.figures()
        yield from self._process(figures)
        yield from _listeners(figures.listeners)
        if figures.log is not None:
            yield from _log(figures.log)
        if figures.bus is not None:
            yield from _by_key(names.BUS, figures.bus)
            yield _delays(figures.bus["delays"])
        yield _family(names.NODES, {(): len(self._statistics.nodes())})
        yield from _carriers(self._statistics.carriers())
        yield from _sinks(figures.sinks)

    def _process(self, figures: Figures) -> Iterator[Metric]:
        log_id = figures.log.id if figures.log is not None else ""
        yield _family(names.INFO, {(figures.version, figures.node, log_id, figures.loop): 1})
        yield _family(names.READY, {(): not self._statistics.not_ready()})
        yield _family(names.START_TIME, {(): figures.started})


def _listeners(listeners: list[ListenerFigures]) -> Iterator[Metric]:
    yield _family(names.CONNECTIONS, {(one.protocol,): one.connections for one in listeners})
    yield _family(names.MAX_CONNECTIONS, {(one.protocol,): one.max_connections for one in listeners})
    for key, metric in names.CONNECTION_COUNTERS.items():
        yield _family(metric, {(one.protocol,): one.counters[key] for one in listeners})
    yield _family(
        names.SESSION_EVENTS,
        {(one.protocol, event): count for one in listeners for event, count in one.events.items()},
    )
    yield _family(
        names.SESSION_GAUGES,
        {(one.protocol, what): held for one in listeners for what, held in one.gauges.items()},
    )


def _log(log: LogFigures) -> Iterator[Metric]:
    yield _family(names.LOG_FULL, {(): log.full is not None})
    yield _family(names.LOG_FAILED, {(): log.failed is not None})
    yield _family(names.LOG_RECOVERY_SECONDS, {(): log.recovery["seconds"]})
    yield _family(names.LOG_RECOVERY_CUT, {(): log.recovery["cut_bytes"]})
    yield _family(names.LOG_RECOVERY_DAMAGE, {(): len(log.recovery["damage"])})
    yield from _by_key(names.LOG, log.stats)


def _delays(delays: Mapping[str, Any]) -> Metric:
    family = HistogramMetricFamily(names.DELAYS.name, names.DELAYS.help, labels=names.DELAYS.labels)
    for protocol, seen in delays.items():
        counts = [
            (bound, sum(count for end, count in seen["steps"] if end <= bound))
            for bound in (*names.DELAY_BOUNDS, math.inf)
        ]
        texts = [("+Inf" if bound == math.inf else repr(bound), count) for bound, count in counts]
        family.add_metric((protocol,), texts, seen["seconds"])
    return family


def _sinks(sinks: list[SinkFigures]) -> Iterator[Metric]:
    yield _family(names.SINK_COVERED, {(one.drop,): one.covered for one in sinks})
    yield _family(names.SINK_LAG_OFFSETS, {(one.drop,): one.lag_offsets for one in sinks})
    yield _family(names.SINK_LAG_SECONDS, {(one.drop,): one.lag_seconds for one in sinks})
    ours = [one for one in sinks if one.stats]
    for key, metric in names.SINK.items():
        yield _family(metric, {(one.drop,): one.stats[key] for one in ours})
    yield _family(
        names.SINK_FAILURES,
        {(one.drop, reason): count for one in ours for reason, count in one.stats["failures"].items()},
    )


def _carriers(carriers: list[CarrierFigures]) -> Iterator[Metric]:
    yield _family(names.CARRIER_CONNECTED, {(one.name,): one.connected for one in carriers})
    yield _family(
        names.CARRIER_EVENTS,
        {(one.name, event): count for one in carriers for event, count in one.counts.items()},
    )


def _by_key(known: Mapping[str, names.Metric], values: Mapping[str, Any]) -> Iterator[Metric]:
    for key, metric in known.items():
        value = values[key]
        yield _family(
            metric, {(one,): number for one, number in value.items()} if metric.labels else {(): value}
        )


def _family(metric: names.Metric, samples: Mapping[tuple[str, ...], float] | None = None) -> Metric:
    if metric.kind == "histogram":
        return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in (samples or {}).items():
        family.add_metric(labels, float(value))
    return family
