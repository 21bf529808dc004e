"""Every command line of the README and of docs/ that is in a block, not in a sentence, is one that exists."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from headrace.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SEPARATORS = {"|", "||", "&", "&&", ";"}
REDIRECTIONS = {"<", ">", ">>"}


def blocks(page: str) -> Iterator[str]:
    """What is for a shell: the blocks of `sh`, what `console` has after a prompt, and what is indented."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if language == "sh":
            yield block
        if language == "console":
            yield "".join(re.findall(r"^\$ (.*\n)", block, re.MULTILINE))
    rest = re.sub(r"^```\w*\n.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"(?<=\n\n)(?:    .*\n)+", rest)


def commands(block: str) -> Iterator[list[str]]:
    """The commands of a shell, as words."""
    for line in block.replace("\\\n", " ").splitlines():
        if "headrace" not in line:
            continue
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        skipped = False
        for word in [*words, ";"]:
            if word in SEPARATORS:
                yield command
                command = []
            elif not skipped and word not in REDIRECTIONS:
                command.append(word)
            skipped = word in REDIRECTIONS


def taken(page: Path) -> Iterator[list[str]]:
    """The arguments of every `headrace` of a page."""
    for block in blocks(page.read_text("utf-8")):
        for name, *arguments in filter(None, commands(block)):
            # A usage has brackets around what can be left out; `headrace ready` is what a gateway says.
            if Path(name).name == "headrace" and arguments[:1] != ["ready"]:
                yield [re.sub(r"^\[|\](\.\.\.)?$", "", word) for word in arguments]


LINES = [(page, line) for page in PAGES for line in taken(page)]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], object]:
    """Reads a command line as `headrace` does, and does nothing."""
    monkeypatch.setattr(click.Command, "invoke", lambda self, context: None)
    # Files have the names that the reader gives them.
    for kind in (click.Path, click.File):
        monkeypatch.setattr(kind, "convert", lambda self, value, parameter, context: value)
    return lambda arguments: main(arguments, prog_name="headrace", standalone_mode=False)


@pytest.mark.parametrize(
    ("page", "arguments"), LINES, ids=[f"{page.stem}: {shlex.join(line)}" for page, line in LINES]
)
def test_a_command_of_a_page_is_one(
    parse: Callable[[list[str]], object], page: Path, arguments: list[str]
) -> None:
    assert parse(arguments) is None


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("headrace spark report drop page.html --output x", "--output"),
        ("headrace spark report drop", "FILE"),
        ("printf 1 | headrace nodes all > out  # and more", "extra argument"),
        ("x=1; headrace confg check", "confg"),
        ("headrace bench --mode fastest &", "fastest"),
    ],
)
def test_what_no_command_takes_is_found(
    line: str, complaint: str, tmp_path: Path, parse: Callable[[list[str]], object]
) -> None:
    page = tmp_path / "page.md"
    for text in (
        f"```sh\n{line}\n```\n",
        f"```console\n$ {line}\nheadrace?\n```\n",
        f"Like so:\n\n    {line}\n",
    ):
        page.write_text(text)
        (arguments,) = taken(page)
        with pytest.raises(click.UsageError) as refused:
            parse(arguments)
        assert complaint in refused.value.format_message()


def test_every_page_that_names_commands_is_looked_at() -> None:
    assert {page.name for page, _ in LINES} >= {
        "README.md",
        "clients.md",
        "operations.md",
        "spark.md",
        "felix.md",
    }
