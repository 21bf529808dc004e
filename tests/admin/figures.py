"""A gateway's statistics, made up or taken from a real log and bus, for tests of the web side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.admin import names
from headrace.admin.statistics import CarrierFigures, Figures, ListenerFigures, LogFigures, SinkFigures
from headrace.bus import Bus
from headrace.connection import Service
from headrace.log import Log
from headrace.session import PySession


class RealStatistics:
    """What a gateway with one protocol, a log and a bus would say."""

    def __init__(self, directory: Path) -> None:
        self.log = Log(directory / "log", segment_bytes=256 * 1024, pool_segments=1)
        self.bus = Bus(self.log)
        self.service = Service(
            "blipmq", PySession, max_frame=1, high_water=1, max_connections=5, stall_timeout=1
        )
        self.node = "edge"
        self.reasons: list[str] = []
        self.cautions: list[str] = []
        self.full: str | None = None
        self.opened = True

    def close(self) -> None:
        self.bus.close()
        self.log.close()

    def figures(self) -> Figures:
        listener = ListenerFigures(
            protocol="blipmq",
            addresses=["127.0.0.1:5555"],
            tls=False,
            connections=2,
            max_connections=5,
            counters={**self.service.counters(), "opened": 7, "bytes_in": 1234},
            events={"hellos": 3},
            gauges={"cache_entries": 4},
        )
        figures = Figures(version="1.2.3", node=self.node, loop="uvloop", started=1_000_000.5, uptime=12.25)
        if not self.opened:
            return figures
        recovery = self.log.recovery._asdict()
        log = LogFigures(
            id=self.log.id_text,
            path=self.log.path,
            sync=self.log.sync,
            stats=self.log.stats(),
            full=self.full,
            failed=None,
            recovery=recovery,
        )
        sink = SinkFigures(
            drop="default",
            uri="/data/drop",
            run=True,
            covered=3,
            lag_offsets=4,
            lag_seconds=1.5,
            stats={
                **dict.fromkeys(names.SINK, 1),
                "rows": 3,
                "failures": {"space": 2, "rights": 0},
            },
        )
        other = SinkFigures(
            drop="events", uri="s3://b", run=False, covered=7, lag_offsets=0, lag_seconds=0, stats={}
        )
        return Figures(
            **{
                **vars(figures),
                "listeners": [listener],
                "log": log,
                "bus": self.bus.stats(),
                "sinks": [sink, other],
            },
        )

    def segments(self) -> list[Mapping[str, Any]]:
        return [segment._asdict() for segment in self.log.segments()]

    def nodes(self) -> list[dict[str, Any]]:
        return [{"node-name": "web1", "node-uuid": "0" * 32}]

    def carriers(self) -> list[CarrierFigures]:
        return [CarrierFigures("field", "mqtt", True, {"taken": 3})]

    def not_ready(self) -> list[str]:
        return self.reasons

    def warnings(self) -> list[str]:
        return self.cautions
