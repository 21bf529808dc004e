"""Stores with every result what it was measured on: processor, kernel, versions, date. Measures nothing."""

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import pytest

VERSIONS_THAT_MATTER = ("headrace", "cython", "uvloop", "pyarrow", "aioquic", "qh3")


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info["versions"] = {name: version(name) for name in VERSIONS_THAT_MATTER}


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in one line, for a person who reads the figures a year later."""
    cpu = machine["cpu"].get("brand_raw") or machine["machine"]
    versions = {machine["python_implementation"]: machine["python_version"], **machine["versions"]}
    return "; ".join(
        [
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            f"{cpu} ({machine['cpu'].get('count')} CPUs)",
            f"{machine['system']} {machine['release']}",
            *(f"{name} {number}" for name, number in versions.items()),
        ]
    )


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    output_json["machine_line"] = machine_line(output_json["machine_info"])
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    reporter.write_line(output_json["machine_line"])
