"""The rules of a test session: what is left out is said aloud, and nothing else may be left out."""

from pathlib import Path

import pytest

from tests import suites

ABSENT = suites.Requirement("Ununennium 9", lambda: None, {"apt-get": ("ununennium", "ununennium-8")})
PRESENT = suites.Requirement("a shell", lambda: Path("/bin/sh"), {})

ONE_TEST_OF_EACH_KIND = """
    import pytest

    def test_plain(): pass

    @pytest.mark.needs("present")
    def test_met(): pass

    @pytest.mark.needs("present", "absent")
    def test_unmet(): assert False
"""


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A test session of its own, with this project's rules and two requirements of which one is met."""
    monkeypatch.setitem(suites.REQUIREMENTS, "absent", ABSENT)
    monkeypatch.setitem(suites.REQUIREMENTS, "present", PRESENT)
    monkeypatch.delenv("CI", raising=False)
    pytester.makeini("[pytest]\nmarkers = needs(*names): \naddopts = --strict-markers -p tests.conftest")
    return pytester


def test_tests_with_unmet_needs_do_not_run_and_the_last_line_says_so(session: pytest.Pytester) -> None:
    session.makepyfile(test_a=ONE_TEST_OF_EACH_KIND)
    result = session.runpytest()
    result.assert_outcomes(passed=2, deselected=1)
    assert result.ret == pytest.ExitCode.OK
    assert result.outlines[-1] == (
        "!!! DID NOT RUN: test_a.py (1): Ununennium 9 was not found; install it (apt-get: ununennium)"
    )


def test_unmet_needs_are_a_failure_in_ci(session: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    session.makepyfile(test_a=ONE_TEST_OF_EACH_KIND)
    result = session.runpytest()
    result.assert_outcomes(passed=2, deselected=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "DID NOT RUN: test_a.py (1)" in result.outlines[-1]


def test_every_suite_that_did_not_run_is_named(session: pytest.Pytester) -> None:
    all_of_a_file = 'import pytest\npytestmark = pytest.mark.needs("absent")\n'
    two_tests = "def test_1(): pass\ndef test_2(): pass"
    session.makepyfile(test_a=ONE_TEST_OF_EACH_KIND, test_b=all_of_a_file + two_tests)
    result = session.runpytest()
    assert "DID NOT RUN: test_a.py (1), test_b.py (2): Ununennium" in result.outlines[-1]


def test_what_was_not_asked_for_is_not_missed(session: pytest.Pytester) -> None:
    session.makepyfile(test_a=ONE_TEST_OF_EACH_KIND)
    result = session.runpytest("-k", "test_plain or test_met")
    result.assert_outcomes(passed=2, deselected=1)
    assert "DID NOT RUN" not in result.stdout.str()


def test_a_session_with_all_needs_met_ends_with_the_summary(
    session: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    session.makepyfile('import pytest\n@pytest.mark.needs("present")\ndef test_met(): pass')
    result = session.runpytest()
    assert result.ret == pytest.ExitCode.OK
    assert "1 passed" in result.outlines[-1]


def test_a_failure_stays_a_failure_when_suites_did_not_run(session: pytest.Pytester) -> None:
    session.makepyfile(test_a=ONE_TEST_OF_EACH_KIND, test_b="def test_wrong(): assert False")
    result = session.runpytest()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "DID NOT RUN" in result.outlines[-1]


def test_an_unknown_need_stops_the_session(session: pytest.Pytester) -> None:
    session.makepyfile('import pytest\n@pytest.mark.needs("jave")\ndef test_typo(): pass')
    result = session.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines("*needs(jave): tests/suites.py has no such requirement")


@pytest.mark.parametrize(
    "source",
    [
        "import pytest\ndef test_x(): pytest.skip('not today')",
        "import pytest\n@pytest.mark.skipif(True, reason='not here')\ndef test_x(): pass",
        "import pytest\npytest.importorskip('ununennium')\ndef test_x(): pass",
    ],
    ids=["in the test", "by a mark", "in the module"],
)
def test_skipping_by_any_other_way_fails_the_session(session: pytest.Pytester, source: str) -> None:
    session.makepyfile(test_a=source, test_b="def test_fine(): pass")
    result = session.runpytest()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "!!! SKIPPED, which only needs(...) may cause: test_a.py" in result.outlines[-1]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "1 times, at random"),
        ({"CI": "true"}, "1 times, repeatably"),
        ({"CI": "true", "HEADRACE_SOAK": "7"}, "7 times, at random"),
    ],
    ids=["default", "ci", "soak"],
)
def test_the_environment_says_how_hard_to_work_and_hypothesis_follows(
    session: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    monkeypatch.delenv("HEADRACE_SOAK", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    session.makepyfile("""
        from hypothesis import settings

        def test_show(soak):
            assert settings().max_examples == 100 * soak
            print(soak, "times,", "repeatably" if settings().derandomize else "at random")
    """)
    result = session.runpytest_subprocess("-s")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(f"*{expected}*")
