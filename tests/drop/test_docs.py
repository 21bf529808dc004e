"""docs/drop.md says what the files are."""

from pathlib import Path

import pytest

from headrace.drop import COLUMNS, OPTIONAL_COLUMNS, schema

TEXT = (Path(__file__).parents[2] / "docs" / "drop.md").read_text()


@pytest.mark.parametrize("column", [*COLUMNS, *OPTIONAL_COLUMNS], ids=lambda column: column.name)
def test_docs_have_every_column_and_its_meaning(column: schema.Column) -> None:
    null = "yes" if column.nullable else "no"
    assert f"| `{column.name}` | `{column.type}` | {null} | {column.meaning} |\n" in TEXT


def test_docs_have_no_other_columns() -> None:
    tables = TEXT.partition("## Columns")[2].partition("## Names")[0]
    rows = [line for line in tables.splitlines() if line.startswith("| `")]
    assert len(rows) == len(COLUMNS) + len(OPTIONAL_COLUMNS)


def test_docs_have_the_version_and_every_key_of_the_metadata() -> None:
    assert f"has a version, now {schema.SCHEMA_VERSION}." in TEXT
    keys = [value.decode() for name, value in vars(schema).items() if name.endswith("_KEY")]
    assert len(keys) == 4
    for key in keys:
        assert f"| `{key}` | " in TEXT
