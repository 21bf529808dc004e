"""The web side's pages over real HTTP, on both loops."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from headrace.admin import names
from headrace.admin.server import AdminServer
from headrace.guarantees import as_data
from tests.admin.figures import RealStatistics
from tests.streams import on_both_loops, run


@pytest.fixture
def statistics(tmp_path: Path) -> Iterator[RealStatistics]:
    real = RealStatistics(tmp_path)
    yield real
    real.close()


@asynccontextmanager
async def serving(statistics: RealStatistics) -> AsyncIterator[aiohttp.ClientSession]:
    admin = AdminServer(statistics)
    answer = await admin.start()
    server = await asyncio.get_running_loop().create_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        yield client
    server.close()
    await admin.stop()


@on_both_loops
def test_metrics_are_served_in_the_format_that_was_asked_for(loop: str, statistics: RealStatistics) -> None:
    async def main() -> None:
        async with serving(statistics) as client:
            async with client.get("/metrics") as response:
                assert response.status == 200
                assert response.headers["Content-Type"].startswith("text/plain; version=")
                text = await response.text()
            assert f"# HELP {names.READY.name} {names.READY.help}\n" in text
            assert f"# TYPE {names.READY.name} gauge\n" in text
            assert f'{names.CONNECTIONS.name}{{protocol="blipmq"}} 2.0\n' in text
            accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
            async with client.get("/metrics", headers=accept) as response:
                assert response.headers["Content-Type"].startswith("application/openmetrics-text")
                assert (await response.text()).endswith("# EOF\n")

    run(loop, main)


@on_both_loops
def test_health_is_that_the_loop_turns(loop: str, statistics: RealStatistics) -> None:
    async def main() -> None:
        statistics.reasons = ["the gateway is starting"]
        async with serving(statistics) as client, client.get("/healthz") as response:
            assert response.status == 200
            assert await response.json() == {"status": "ok"}

    run(loop, main)


@on_both_loops
def test_readiness_is_503_with_reasons_and_200_without(loop: str, statistics: RealStatistics) -> None:
    async def main() -> None:
        async with serving(statistics) as client:
            async with client.get("/readyz") as response:
                assert response.status == 200
                assert await response.json() == {"ready": True, "reasons": [], "warnings": []}
            statistics.cautions = ["the drop default cannot be written: no rights"]
            async with client.get("/readyz") as response:
                assert response.status == 200
                assert (await response.json())["warnings"] == statistics.cautions
            statistics.reasons = ["the log is full: no space left"]
            async with client.get("/readyz") as response:
                assert response.status == 503
                assert response.content_type == "application/json"
                assert await response.json() == {
                    "ready": False,
                    "reasons": statistics.reasons,
                    "warnings": statistics.cautions,
                }

    run(loop, main)


@on_both_loops
def test_status_tells_all_there_is(loop: str, statistics: RealStatistics) -> None:
    async def main() -> None:
        statistics.bus.publish("a", b"x", protocol=1)
        async with serving(statistics) as client, client.get("/api/status") as response:
            status = await response.json()
        assert status["version"] == "1.2.3"
        assert status["node"] == "edge"
        assert status["uptime"] == 12.25
        assert status["ready"] is True
        assert status["log"]["id"] == statistics.log.id_text
        stats = status["log"]["stats"]
        assert (stats["first_offset"], stats["appended_offset"]) == (0, 1)
        assert stats["safe_offset"] <= 1
        assert status["log"]["recovery"]["cut_bytes"] == 0
        assert [segment["number"] for segment in status["segments"]] == [1]
        [listener] = status["listeners"]
        assert listener["protocol"] == "blipmq"
        assert listener["connections"] == 2
        assert status["bus"]["published"]["blipmq"] == 1

    run(loop, main)


@on_both_loops
def test_guarantees_are_those_of_the_data(loop: str, statistics: RealStatistics) -> None:
    async def main() -> None:
        async with serving(statistics) as client, client.get("/api/guarantees") as response:
            assert response.status == 200
            told = await response.json()
        assert told == json.loads(json.dumps(as_data()))
        assert len(told["pairs"]) == 25

    run(loop, main)


@on_both_loops
def test_status_of_a_gateway_that_just_starts(loop: str, statistics: RealStatistics) -> None:
    async def main() -> None:
        statistics.opened = False
        async with serving(statistics) as client:
            async with client.get("/api/status") as response:
                status = json.loads(await response.text())
            assert status["log"] is None
            assert status["bus"] is None
            async with client.get("/") as response:
                assert response.status == 200

    run(loop, main)


@on_both_loops
def test_the_page_shows_names_that_look_like_markup_as_text(loop: str, statistics: RealStatistics) -> None:
    async def main() -> None:
        statistics.node = "<script>alert(1)</script>"
        statistics.reasons = ["because of <b>this</b> & that"]
        async with serving(statistics) as client, client.get("/") as response:
            assert response.status == 200
            assert response.content_type == "text/html"
            page = await response.text()
        assert "<script>" not in page
        assert "&lt;script&gt;" in page
        assert "because of &lt;b&gt;this&lt;/b&gt; &amp; that" in page
        assert statistics.log.id_text in page
        assert "127.0.0.1:5555" in page

    run(loop, main)


@on_both_loops
@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/readyz", "/api/status", "/nowhere"])
def test_answers_are_not_kept_and_may_load_nothing(loop: str, path: str, statistics: RealStatistics) -> None:
    async def main() -> None:
        async with serving(statistics) as client, client.get(path) as response:
            assert response.status == (404 if path == "/nowhere" else 200)
            assert response.headers["Cache-Control"] == "no-store"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")

    run(loop, main)


@on_both_loops
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(loop: str, method: str, statistics: RealStatistics) -> None:
    async def main() -> None:
        async with serving(statistics) as client, client.request(method, "/api/status") as response:
            assert response.status == 405

    run(loop, main)
