"""Configurations from files, variables and --set: layers, origins, and everything that is refused."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from headrace import limits
from headrace.config import Config, Loaded, load
from headrace.config.schema import SETTINGS
from headrace.config.settings import Setting
from headrace.errors import ConfigError

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file `h.toml` in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        Path("h.toml").write_bytes(text.encode())
        return Path("h.toml")

    return write


def refused(
    file: Path | None = None, environ: Mapping[str, str] | None = None, sets: Sequence[str] = ()
) -> list[str]:
    """The problems with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        load(file, environ or {}, sets)
    assert caught.value.exit_code == 2
    assert str(caught.value).count("\n") == len(caught.value.problems)
    return [str(problem) for problem in caught.value.problems]


def one_refused(
    file: Path | None = None, environ: Mapping[str, str] | None = None, sets: Sequence[str] = ()
) -> str:
    (problem,) = refused(file, environ, sets)
    return problem


# --- layers -------------------------------------------------------------------------------------------------


def test_nothing_given_is_the_embedded_default() -> None:
    assert load(None, {}, []) == Loaded(Config(), {}, None)


def test_variables_go_over_the_file_and_sets_over_both(write: Write) -> None:
    file = write('[log]\nsync = "none"\npool_segments = 5\nblock_timeout = 1\n')
    environ = {"HEADRACE_LOG__SYNC": "every:5", "HEADRACE_LOG__POOL_SEGMENTS": "6", "PATH": "/bin"}
    loaded = load(file, environ, ["log.sync=interval:7", "log.sync=interval:8"])
    assert loaded.config.log.sync == "interval:8"
    assert loaded.config.log.pool_segments == 6
    assert loaded.config.log.block_timeout == 1.0
    assert loaded.config.log.on_full == "block"
    assert loaded.source == Path("h.toml")
    assert loaded.origins == {
        "log.sync": "--set log.sync",
        "log.pool_segments": "HEADRACE_LOG__POOL_SEGMENTS",
        "log.block_timeout": "h.toml:4",
    }


def test_every_key_has_a_variable_and_can_be_set() -> None:
    for key, leaf in SETTINGS.items():
        name = "HEADRACE_" + key.upper().replace(".", "__")
        value = leaf.kind.write(leaf.default) if isinstance(leaf, Setting) else "[]"
        assert load(None, {name: value}, []).origins == {key: name}
        assert load(None, {}, [f"{key} = {value}"]).origins == {key: f"--set {key}"}


@pytest.mark.parametrize(
    ("text", "name"),
    [("edge", "edge"), ('"edge"', "edge"), ("123", "123"), ("true", "true"), ("1979-05-27", "1979-05-27")],
)
def test_values_outside_files_are_toml_where_that_fits_and_text_otherwise(text: str, name: str) -> None:
    assert load(None, {"HEADRACE_NODE__NAME": text}, []).config.node.name == name
    assert load(None, {}, [f"node.name={text}"]).config.node.name == name


def test_a_newline_in_a_value_does_not_set_another_key() -> None:
    problem = one_refused(None, {"HEADRACE_LOG__POOL_SEGMENTS": '3\nsync = "none"'})
    assert problem.startswith("HEADRACE_LOG__POOL_SEGMENTS: log.pool_segments: expected a whole number")


def test_sizes_and_durations_may_have_units(write: Write) -> None:
    file = write('log.retention_bytes = "2GiB"\nlog.block_timeout = "500ms"\nbus.durable_grace = 7\n')
    config = load(file, {"HEADRACE_LISTEN__BLIPMQ__HIGH_WATER": "1MB"}, ["drop.roll_seconds=1h"]).config
    assert config.log.retention_bytes == 2 << 30
    assert config.log.block_timeout == 0.5
    assert config.bus.durable_grace == 7.0
    assert isinstance(config.bus.durable_grace, float)
    assert config.listen.blipmq.high_water == 1_000_000
    assert config.drop.roll_seconds == 3600.0


def test_bind_is_off_one_address_or_many() -> None:
    config = load(
        None,
        {"HEADRACE_LISTEN__FELIX__BIND": "", "HEADRACE_ADMIN__BIND": "unix:/run/h.sock"},
        ['listen.blipmq.bind=["127.0.0.1:1", "fd:x"]'],
    ).config
    assert config.listen.felix.bind == []
    assert config.listen.felix.addresses == []
    assert config.admin.bind == ["unix:/run/h.sock"]
    assert [str(address) for address in config.listen.blipmq.addresses] == ["127.0.0.1:1", "fd:x"]


def test_a_whole_table_may_be_set_and_keeps_what_it_does_not_name() -> None:
    loaded = load(None, {"HEADRACE_LOG": '{sync = "none"}'}, ["log={pool_segments = 4}"])
    assert (loaded.config.log.sync, loaded.config.log.pool_segments) == ("none", 4)
    assert loaded.origins == {"log.sync": "HEADRACE_LOG", "log.pool_segments": "--set log"}


def test_keys_are_replaced_as_a_whole(write: Write) -> None:
    file = write(
        '[[keys]]\nname = "a"\nkey = "1"\npublish = ["x.#"]\n'
        '[[keys]]\nname = "b"\nkey = "2"\nsubscribe = ["#"]\n'
    )
    loaded = load(file, {}, [])
    assert [(key.name, key.key, key.publish, key.subscribe) for key in loaded.config.keys] == [
        ("a", "1", ["x.#"], []),
        ("b", "2", [], ["#"]),
    ]
    assert loaded.origins["keys"] == "h.toml:1"
    assert loaded.origins["keys[1].key"] == "h.toml:7"
    over = load(file, {}, ['keys=[{name="c", key="3", publish=["#"]}]'])
    assert [key.name for key in over.config.keys] == ["c"]
    assert set(over.origins.values()) == {"--set keys"}


def test_relative_paths_start_from_the_file_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "etc" / "c.pem").touch()
    (tmp_path / "run" / "k.pem").touch()
    (tmp_path / "etc" / "h.toml").write_text('listen.blipmq.tls_cert = "c.pem"\ndrop.uri = "out"\n')
    monkeypatch.chdir(tmp_path / "run")
    config = load(Path("../etc/h.toml"), {}, ["listen.blipmq.tls_key=k.pem"]).config
    assert Path(config.listen.blipmq.tls_cert).samefile(tmp_path / "etc" / "c.pem")
    assert config.listen.blipmq.tls_key == str(tmp_path / "run" / "k.pem")
    assert Path(config.drop.uri).is_absolute()
    assert os.path.normpath(config.drop.uri) == str(tmp_path / "etc" / "out")


@pytest.mark.parametrize(
    "uri", ["", "/srv/drop", "s3://bucket/drop", "hdfs://host:8020/drop", "file:///srv/drop"]
)
def test_drop_may_be_a_path_or_a_uri(uri: str) -> None:
    assert load(None, {}, [f"drop.uri={uri}"]).config.drop.uri == uri


# --- what is refused, and how it is told -------------------------------------------------------------------


def test_unknown_keys_are_named_with_their_line_and_the_nearest_name(write: Write) -> None:
    file = write(
        "[lgo]\nx = 1\n[log]\nsycn = 1\nbind = 2\nzzzz = 3\n[listen.blimpq]\n[listen]\nfelix.hihg_water = 4\n"
        '[[keys]]\nname = "a"\nkey = "k"\npublsih = ["#"]\n'
    )
    assert refused(file) == [
        'h.toml:1: lgo: there is no such key, did you mean "log"?',
        'h.toml:4: log.sycn: there is no such key, did you mean "log.sync"?',
        'h.toml:5: log.bind: there is no such key, did you mean "listen.blipmq.bind"?',
        "h.toml:6: log.zzzz: there is no such key; known are sync, segment_bytes, pool_segments,"
        " retention_bytes, retention_seconds, on_full, block_timeout, hold_for_subscriptions",
        'h.toml:7: listen.blimpq: there is no such key, did you mean "listen.blipmq"?',
        'h.toml:9: listen.felix.hihg_water: there is no such key, did you mean "listen.felix.high_water"?',
        'h.toml:13: keys[0].publsih: there is no such key, did you mean "keys[0].publish"?',
    ]


def test_unknown_variables_are_refused_except_those_that_mean_something_else() -> None:
    reserved = ("CLIENT_KEY", "CONFIG", "DATA", "DEBUG", "ONLY", "SOAK")
    assert load(None, {f"HEADRACE_{name}": "1" for name in reserved}, []).config == Config()
    assert refused(None, {"HEADRACE_LOG_SYNC": "x", "HEADRACE_ZZZZ": "x", "HEADRACE_log__sync": "none"}) == [
        "HEADRACE_LOG_SYNC: there is no such variable, did you mean HEADRACE_LOG__SYNC?",
        "HEADRACE_ZZZZ: there is no such variable",
        "HEADRACE_log__sync: there is no such variable, did you mean HEADRACE_LOG__SYNC?",
    ]


def test_bad_sets_are_told_with_their_text() -> None:
    assert refused(
        None, {}, ["log.sync", "lgo.sync=none", "log.sync=often", "log.sync.x=1", "keys.0.name=x", "log=5"]
    ) == [
        "--set log.sync: expected KEY=VALUE, like log.sync=always",
        '--set lgo.sync=...: lgo: there is no such key, did you mean "log"?',
        '--set log.sync=often: log.sync: expected "always", "none", "every:N" (N messages, 1 to 1000000) or '
        '"interval:MS" (milliseconds, 1 to 60000); got "often" (there is no such policy)',
        '--set log.sync.x=...: log.sync.x: there is no such key: "log.sync" has no keys below it',
        '--set keys.0.name=...: keys.0: there is no such key: "keys" is set as a whole',
        "--set log=...: log: expected a table with the keys sync, segment_bytes, pool_segments,"
        " retention_bytes, retention_seconds, on_full, block_timeout, hold_for_subscriptions; got 5",
    ]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("log.sync", '"every:0"', "followed by a whole number"),
        ("log.sync", '"every:"', "followed by a whole number"),
        ("log.sync", '"every:2000000"', "out of bounds"),
        ("log.sync", '"interval:60001"', "out of bounds"),
        ("log.sync", "5", "got 5"),
        ("log.segment_bytes", '"255KiB"', "from 256KiB to 1GiB, a multiple of 4096"),
        ("log.segment_bytes", '"2GiB"', "from 256KiB to 1GiB"),
        ("log.segment_bytes", "67108865", "a multiple of 4096"),
        ("log.segment_bytes", '"64M"', '"M" is not one of the units'),
        ("log.segment_bytes", "true", "got true"),
        ("log.pool_segments", "0", "from 1 to 64; got 0"),
        ("log.pool_segments", "3.0", "a whole number"),
        ("log.pool_segments", "0x" + "f" * 5000, "a number of more than 64 bits"),
        ("log.block_timeout", "-1", "from 0 to 1h"),
        ("log.block_timeout", "nan", "must be finite"),
        ("log.block_timeout", "inf", "must be finite"),
        ("log.block_timeout", '"soon"', "not a number with a unit"),
        ("log.on_full", '"explode"', 'expected "block" or "drop_oldest"; got "explode"'),
        ("log.hold_for_subscriptions", '"yes"', "expected true or false"),
        ("log", "[1]", "expected a table with the keys sync"),
        ("node.name", '"a/b"', "a name of 1 to 64"),
        ("node.name", '"a\\n"', "a name of 1 to 64"),
        ("node.name", '""', "a name of 1 to 64"),
        ("bus.dead_letter_prefix", '"dead"', "each end in a dot"),
        ("bus.dead_letter_prefix", '"#."', "each end in a dot"),
        ("listen.blipmq.bind", '"localhost"', "the port is missing"),
        ("listen.blipmq.bind", '["localhost:1", 5]', '"host:port", "[v6]:port", "unix:/path", "fd:NAME"'),
        ("listen.blipmq.bind", '["a:1", "a:1"]', "twice"),
        ("listen.blipmq.bind", '[""]', "the port is missing"),
        ("listen.felix.bind", '"unix:/x"', "cannot use"),
        ("listen.blipmq.max_frame_bytes", '"17MiB"', "from 64KiB to 16MiB"),
        ("listen.blipmq.max_frame_bytes", '"63KiB"', "from 64KiB to 16MiB"),
        ("drop.uri", '"ftp://x/y"', '"ftp" is no filesystem'),
        ("drop.uri", '"s3://"', "nothing behind the scheme"),
        ("drop.uri", '"a\\u0000b"', "NUL"),
        ("keys", "{}", "write [[keys]]"),
        ("keys", '["a"]', "write [[keys]]"),
    ],
)
def test_bad_value_is_told_with_its_line_and_what_was_expected(
    write: Write, key: str, value: str, expected: str
) -> None:
    problem = one_refused(write(f"# one line\n{key} = {value}\n"))
    assert problem.startswith(f"h.toml:2: {key}: ")
    assert expected in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('key = "k"\npublish = ["#"]', 'h.toml:1: keys[0]: "name" is missing'),
        ('name = "a"\npublish = ["#"]', 'h.toml:1: keys[0]: "key" is missing'),
        (
            'name = "a"\nkey = ""\npublish = ["#"]',
            "h.toml:3: keys[0].key: expected a text of 1 to 65535 bytes (an empty",
        ),
        (
            f'name = "a"\nkey = "{"x" * 65536}"\npublish = ["#"]',
            "h.toml:3: keys[0].key: expected a text of 1 to 65535",
        ),
        ('name = "a"\nkey = 5\npublish = ["#"]', "h.toml:3: keys[0].key: expected a text"),
        ('name = "a b"\nkey = "k"\npublish = ["#"]', "h.toml:2: keys[0].name: expected a name"),
        (
            'name = "a"\nkey = "k"\npublish = ["x", ""]',
            "h.toml:4: keys[0].publish: expected a list of at most 1000",
        ),
        (
            'name = "a"\nkey = "k"\nsubscribe = "#"',
            "h.toml:4: keys[0].subscribe: expected a list of at most 1000",
        ),
        (
            'name = "a"\nkey = "k"\npublish = [1]',
            "h.toml:4: keys[0].publish: expected a list of at most 1000",
        ),
    ],
)
def test_bad_key_is_told_with_its_line(write: Write, text: str, expected: str) -> None:
    assert one_refused(write(f"[[keys]]\n{text}\n")).startswith(expected)


def test_everything_that_is_wrong_is_told_at_once(write: Write) -> None:
    file = write('log.sync = "x"\nnope = 1\n[[keys]]\nname = "a"\nkey = ""\n[gateway]\nloop = "curio"\n')
    places = [
        problem.partition(": ")[0]
        for problem in refused(file, {"HEADRACE_NOPE": "1", "HEADRACE_LOG": "1"}, ["x", "y=1"])
    ]
    assert places == [
        "h.toml:1",
        "h.toml:2",
        "h.toml:5",
        "h.toml:7",
        "HEADRACE_LOG",
        "HEADRACE_NOPE",
        "--set x",
        "--set y=...",
    ]


def test_a_bad_value_is_told_even_where_a_later_one_is_good(write: Write) -> None:
    assert one_refused(write('log.sync = "x"\n'), {"HEADRACE_LOG__SYNC": "none"}).startswith(
        "h.toml:1: log.sync"
    )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[log]\nsync = \n", "h.toml:2: is not TOML at column 8: "),
        ('a = 1\r\nb = "x\r\n', "h.toml:2: is not TOML"),
        ("[log\n", "h.toml:1: is not TOML"),
        ("[log]\nsync = 'a'\nsync = 'b'\n", "h.toml:3: is not TOML"),
        ("[log]\n\n[log]\n", "h.toml:3: is not TOML"),
        ('x = 1\na = """\n\n', "h.toml:2: is not TOML: "),
        ("a = " + "9" * 5000, "h.toml: is not TOML: "),
    ],
)
def test_syntax_error_is_told_with_its_line(write: Write, text: str, place: str) -> None:
    assert one_refused(write(text)).startswith(place)


def test_lines_are_right_in_a_file_with_windows_line_ends(write: Write) -> None:
    assert one_refused(write('[log]\r\n\r\nsync = "x"\r\n')).startswith("h.toml:3: log.sync")


def test_file_that_cannot_be_used_is_told(write: Write, tmp_path: Path) -> None:
    write("")
    assert one_refused(Path("absent.toml")) == "absent.toml: cannot be read: No such file or directory"
    assert one_refused(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    Path("h.toml").write_bytes(b"a = 1\nb = '\xff'\n")
    assert one_refused(Path("h.toml")) == "h.toml:2: is not UTF-8 here, as TOML must be"
    Path("h.toml").write_bytes(b"#" * (limits.CONFIG_FILE_BYTES + 1))
    assert one_refused(Path("h.toml")) == "h.toml: is larger than 4194304 bytes"


def test_deep_nesting_is_refused_and_does_not_crash(write: Write) -> None:
    depth = 100_000
    assert "h.toml" in one_refused(write("a = " + "[" * depth + "]" * depth))
    assert one_refused(None, {"HEADRACE_NODE__NAME": "[" * depth}).startswith(
        "HEADRACE_NODE__NAME: node.name"
    )


def test_secrets_are_not_in_messages(write: Write) -> None:
    problems = refused(
        write('[[keys]]\nname = "a"\nkey = {secret = "s3cret"}\n'),
        {"HEADRACE_KEYS": '[{name="b", key="s3cret"'},
        ['keys=[{name="c", key=["s3cret"], publish=["#"]}]', 'kyes=[{key="s3cret"}]'],
    )
    assert len(problems) == 4
    assert "s3cret" not in "".join(problems)


def test_refused_values_are_shown_short_and_printable() -> None:
    problem = one_refused(None, {}, ["node.name=" + "\x1b[31m" + "x" * 500])
    assert problem.isprintable()
    assert "x" * 60 in problem
    assert "x" * 100 not in problem


def test_text_that_is_not_utf8_is_refused() -> None:
    assert "it is not UTF-8" in one_refused(None, {"HEADRACE_DROP__URI": os.fsdecode(b"/srv/\xff")})
