"""The requirements that are made from pyproject.toml: for a build, and for a run with the oldest versions."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def project(*dependencies: str, build: str = "tool>=7") -> dict[str, Any]:
    return {
        "build-system": {"requires": [build]},
        "project": {
            "name": "mill",
            "dependencies": list(dependencies),
            "optional-dependencies": {"more": ["extra>=2.5,<3"], "dev": ["mill[more]"]},
        },
    }


def test_every_lower_bound_becomes_an_exact_version(script: Callable[[str], ModuleType]) -> None:
    constraints = script("requirements").oldest(
        project("grain[husk]>=1.0.3", "water-wheel>=4; sys_platform != 'win32'")
    )
    assert constraints == ["extra==2.5", "grain==1.0.3", "tool==7", "water-wheel==4; sys_platform != 'win32'"]


@pytest.mark.parametrize("loose", ["grain", "grain<2", "grain~=1.0", "grain==1.0"])
def test_a_requirement_without_a_lower_bound_is_refused(
    script: Callable[[str], ModuleType], loose: str
) -> None:
    with pytest.raises(ValueError, match="has no lower bound"):
        script("requirements").oldest(project(loose))


def test_a_build_needs_what_the_build_system_requires(script: Callable[[str], ModuleType]) -> None:
    assert script("requirements").build(project()) == ["tool>=7"]


def test_all_requirements_of_this_project_have_lower_bounds(script: Callable[[str], ModuleType]) -> None:
    requirements = script("requirements")
    pyproject = tomllib.loads(Path(requirements.PYPROJECT).read_text())
    named = {constraint.partition("==")[0] for constraint in requirements.oldest(pyproject)}
    assert {"pyarrow", "pyspark", "pytest", "cython"} <= named
