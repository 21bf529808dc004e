"""Prints requirements of pyproject.toml in the form that pip takes.

`build` prints what a build needs, `oldest` every lower bound as an exact version.
"""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def build(pyproject: dict) -> list[str]:
    return pyproject["build-system"]["requires"]


def oldest(pyproject: dict) -> list[str]:
    """One constraint for each package that is required; a requirement without a lower bound is an error."""
    project = pyproject["project"]
    extras = project["optional-dependencies"].values()
    declared = [*build(pyproject), *project["dependencies"], *(item for extra in extras for item in extra)]
    constraints = set()
    for requirement in declared:
        if requirement.startswith(f"{project['name']}["):
            continue
        parts = re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)(,[^;]+)?(;.+)?", requirement)
        if parts is None:
            raise ValueError(f"{requirement!r} has no lower bound")
        constraints.add(f"{parts[1]}=={parts[2]}{parts[4] or ''}")
    return sorted(constraints)


if __name__ == "__main__":
    kinds = {"build": build, "oldest": oldest}
    if len(sys.argv) != 2 or sys.argv[1] not in kinds:
        sys.exit(f"usage: requirements.py {'|'.join(kinds)}")
    print("\n".join(kinds[sys.argv[1]](tomllib.loads(PYPROJECT.read_text()))))
