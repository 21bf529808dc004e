"""Writes a drop directory with a day of a small plant that never was: the picture report.png shows its report.

python docs/images/day.py /tmp/plant/drop
headrace spark report /tmp/plant/drop report.html
"""

import json
import math
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.drop import FileName, arrow_schema, hour_directory

DAY = datetime(2026, 1, 31, tzinfo=UTC)
LOGS = {"edge-north": "5a1f" * 8, "edge-south": "c07e" * 8}
SENDERS = [
    # protocol, topic, messages an hour, size of the payload, latency in ms, shape of the day
    ("blipmq", "plant.press.temperature", 900, 60, 3.0, "shift"),
    ("blipmq", "plant.press.pressure", 900, 60, 3.0, "shift"),
    ("blipmq", "plant.oven.temperature", 700, 60, 4.0, "flat"),
    ("felix", "plant.line1.camera", 90, 9000, 40.0, "shift"),
    ("felix", "plant.line2.camera", 60, 14000, 55.0, "shift"),
    ("relink", "hall.energy.in.meter", 360, 200, 12.0, "flat"),
    ("relink", "hall.energy.in.solar", 240, 200, 15.0, "sun"),
    ("zeroctl", "agv.1.position", 500, 120, 8.0, "shift"),
    ("zeroctl", "agv.2.position", 450, 120, 8.0, "shift"),
    ("zeroctl", "agv.3.position", 300, 120, 30.0, "late"),
    ("overhop", "queue.quality.jobs", 80, 700, 25.0, "shift"),
    ("overhop", "queue.reports.jobs", 12, 2500, 60.0, "flat"),
]


def level(shape: str, hour: float) -> float:
    """How busy a sender is at an hour."""
    match shape:
        case "shift":
            return 0.08 + 0.92 / (1 + math.exp(-2 * (hour - 6))) / (1 + math.exp(2 * (hour - 21.5)))
        case "late":
            return 1.0 if 13 <= hour < 22 else 0.0
        case "sun":
            return max(0.0, math.sin((hour - 7) / 10 * math.pi)) if 7 <= hour <= 17 else 0.0
    return 1.0


def main(drop: Path) -> None:
    chance = random.Random(4)
    offsets = dict.fromkeys(LOGS, 0)
    for hour in range(24):
        for node, log in LOGS.items():
            if node == "edge-south" and hour == 10:
                offsets[node] += 1200  # a file that somebody has removed
                continue
            begin = DAY + timedelta(hours=hour)
            rows = []
            for number, (protocol, topic, rate, size, latency, shape) in enumerate(SENDERS):
                if (number % 3 == 2) != (node == "edge-south"):
                    continue
                busy = 1 + 3 * level("shift", hour) * (hour == 14)  # an incident after lunch
                for _ in range(int(rate * level(shape, hour + 0.5) * chance.uniform(0.9, 1.1))):
                    at = begin + timedelta(seconds=chance.uniform(0, 3600))
                    waited = chance.lognormvariate(math.log(latency * busy), 0.55)
                    sent = {"ts": (at - timedelta(milliseconds=waited)).timestamp(), "v": chance.random()}
                    payload = json.dumps(sent).encode().ljust(int(size * chance.uniform(0.8, 1.4)))
                    host = 10 + number
                    rows.append(
                        (at, protocol, topic, f"{topic.split('.')[0]}-key@10.1.0.{host}:40{host}", payload)
                    )
            rows.sort()
            first = offsets[node]
            offsets[node] += len(rows)
            values = [
                {
                    "node": node,
                    "log": log,
                    "offset": first + place,
                    "ts": at,
                    "protocol": protocol,
                    "topic": topic,
                    "kind": 0,
                    "source": source,
                    "correlation": 0,
                    "payload": payload,
                }
                for place, (at, protocol, topic, source, payload) in enumerate(rows)
            ]
            directory = drop / hour_directory(int(begin.timestamp()) * 1_000_000)
            directory.mkdir(parents=True, exist_ok=True)
            name = FileName(node, log, first, first + len(rows) - 1)
            pq.write_table(
                pa.Table.from_pylist(values, arrow_schema()), directory / str(name), compression="zstd"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
