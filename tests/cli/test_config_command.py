"""`headrace config`, and the frame of the command line around it."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from headrace import __version__
from headrace.cli import main
from headrace.config import Config, load
from headrace.config.load import PREFIX
from headrace.config.options import DEFAULT_DATA, data_option


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(main, arguments, env=environ, prog_name="headrace")


def test_version_and_help_are_told() -> None:
    assert run("--version").output == f"headrace {__version__}\n"
    short, long = run("-h"), run("--help")
    assert short.output == long.output
    assert "config " in short.output
    assert short.exit_code == 0


def test_help_of_a_command_below_works_with_both_options() -> None:
    assert run("config", "show", "-h").output == run("config", "show", "--help").output
    assert "--origin" in run("config", "show", "-h").output


def test_unknown_command_is_a_usage_error() -> None:
    result = run("confg")
    assert result.exit_code == 2
    assert "confg" in result.stderr


def test_only_the_command_that_is_asked_for_is_imported() -> None:
    script = (
        "import sys\n"
        "from headrace.cli import main\n"
        "main(['config', 'default'], standalone_mode=False)\n"
        "print(sorted(name for name in sys.modules if name.startswith('headrace.cli.')), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "['headrace.cli.config']"


def test_show_prints_the_effective_configuration_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text('[log]\nsync = "none"\n[[keys]]\nname = "a"\nkey = "s3cret"\npublish = ["#"]\n')
    result = run(
        "config", "show", "--config", str(file), "--set", "log.pool_segments=4", HEADRACE_LOG__SYNC="every:3"
    )
    assert result.exit_code == 0
    shown = tomllib.loads(result.stdout)
    assert shown["log"]["sync"] == "every:3"
    assert shown["log"]["pool_segments"] == 4
    assert "s3cret" not in result.output
    assert "s3cret" in run("config", "show", "--config", str(file), "--secrets").output


def test_show_tells_origins_on_request() -> None:
    result = run("config", "show", "--origin", HEADRACE_LOG__SYNC="none")
    assert 'sync = "none"  # HEADRACE_LOG__SYNC\n' in result.stdout
    assert "HEADRACE_LOG__SYNC" not in run("config", "show", HEADRACE_LOG__SYNC="none").output


def test_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text('node.name = "from-file"\n')
    assert 'name = "from-file"' in run("config", "show", HEADRACE_CONFIG=str(file)).stdout


def test_bad_configuration_exits_with_2_and_says_everything_on_standard_error(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text('log.sycn = "x"\n[gateway]\nloop = "curio"\n')
    for arguments in (["check", str(file)], ["show", "--config", str(file)]):
        result = run("config", *arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr == (
            "Error: the configuration has 2 problems:\n"
            f'  {file}:1: log.sycn: there is no such key, did you mean "log.sync"?\n'
            f'  {file}:3: gateway.loop: expected "auto", "uvloop" or "asyncio"; got "curio"\n'
        )


def test_check_looks_at_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text("")
    result = run("config", "check", str(file), HEADRACE_LOG__SYNC="nonsense")
    assert (result.exit_code, result.stdout) == (0, f"{file}: good\n")
    assert run("config", "check", str(tmp_path / "absent")).exit_code == 2
    assert run("config", "check").exit_code == 2


def test_check_warns_of_what_is_probably_not_meant(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text('listen.blipmq.bind = "0.0.0.0:5555"\n')
    result = run("config", "check", str(file))
    assert result.exit_code == 0
    assert result.stderr.startswith("Warning: listen.blipmq is open to other machines (0.0.0.0:5555)")


def test_default_prints_a_file_that_check_accepts(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text(run("config", "default").stdout)
    assert run("config", "check", str(file)).stdout == f"{file}: good\n"
    assert load(file, {}, []).config == Config()


def test_reference_prints_the_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert run("config", "reference").stdout == page.read_text()


def test_data_directory_is_an_option_a_variable_or_the_default() -> None:
    @click.command()
    @data_option
    def where(data: Path) -> None:
        click.echo(repr(data))

    runner = CliRunner()
    assert runner.invoke(where, []).output == f"{DEFAULT_DATA!r}\n"
    assert runner.invoke(where, [], env={"HEADRACE_DATA": "/a"}).output == f"{Path('/a')!r}\n"
    assert runner.invoke(where, ["--data", "/b"], env={"HEADRACE_DATA": "/a"}).output == f"{Path('/b')!r}\n"
