"""`replay`: messages of a drop published into a real gateway, in order per topic, and once where a state is kept."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.log import LogReader
from headrace.spark.jobs import replay, topic_matches, topic_pattern
from headrace.spark.jobs.replay import Progress, ReplayFailed, Target
from tests.gateway.gateways import GatewayProcess
from tests.oracle.filters import matches
from tests.spark.jobs.drops import LOG, START, Message, write_file


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), "log.retention_bytes=64MiB") as running:
        running.data = running.child.args[running.child.args.index("--data") + 1]  # type: ignore[attr-defined]
        yield running


def published(gateway: GatewayProcess, prefix: str) -> dict[str, list[bytes]]:
    """What the gateway has of topics that begin so, in order."""
    found: dict[str, list[bytes]] = {}
    with LogReader(Path(gateway.data) / "log") as reader:  # type: ignore[attr-defined]
        while (record := reader.read()) is not None:
            topic = record.topic_name.decode()
            if topic.startswith(prefix):
                found.setdefault(topic.removeprefix(prefix), []).append(bytes(record.payload))
    return found


@pytest.fixture(scope="module")
def drop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Topics of two gateways over two hours, with all bytes in the payloads; more than a portion of one of them."""
    made = tmp_path_factory.mktemp("drop")
    for node, shift in (("edge-1", 0), ("edge-2", 1)):
        for hour in range(2):
            first = hour * 600
            rows = [
                Message(
                    first + n,
                    b"%s %d " % (node.encode(), first + n) + bytes(range(n % 256)),
                    START + timedelta(hours=hour, seconds=2 * n + shift),
                    topic="busy.one" if n % 3 else f"quiet.{n % 4}",
                )
                for n in range(600)
            ]
            write_file(made, rows, node=node)
    return made


def expected(drop: Path, topic: str, hours: int = 2) -> list[bytes]:
    """In the order of their times: the two gateways' messages alternate."""
    rows = []
    for node, shift in (("edge-1", 0), ("edge-2", 1)):
        for hour in range(hours):
            for n in range(600):
                if topic == ("busy.one" if n % 3 else f"quiet.{n % 4}"):
                    payload = b"%s %d " % (node.encode(), hour * 600 + n) + bytes(range(n % 256))
                    rows.append((hour * 3600 + 2 * n + shift, payload))
    return [payload for _, payload in sorted(rows)]


@pytest.mark.needs("java")
def test_messages_arrive_in_order_per_topic_and_byte_for_byte(
    spark: SparkSession, drop: Path, gateway: GatewayProcess
) -> None:
    chosen = replay.select(spark, str(drop), topics=["busy.#", "*.1"])
    done = replay.run(spark, chosen, gateway.places["blipmq"], key="dev-key", prefix="order.", parallel=3)
    assert published(gateway, "order.") == {topic: expected(drop, topic) for topic in ("busy.one", "quiet.1")}
    assert done.published == {topic: len(expected(drop, topic)) for topic in ("busy.one", "quiet.1")}


@pytest.mark.needs("java")
def test_a_rerun_with_its_state_goes_on_where_the_first_one_ended(
    spark: SparkSession, drop: Path, gateway: GatewayProcess, tmp_path: Path
) -> None:
    at = gateway.places["blipmq"]
    state = str(tmp_path / "state")
    early = replay.select(spark, str(drop), until=START + timedelta(hours=1))
    # The second gateway's files were not there yet.
    begun = replay.run(
        spark, early.where("node = 'edge-1'"), at, key="dev-key", prefix="again.", state=state, rate=1e6
    )
    assert begun.messages == 600
    done = replay.run(spark, replay.select(spark, str(drop)), at, key="dev-key", prefix="again.", state=state)
    assert (done.messages, sum(done.skipped.values())) == (1800, 600)
    found = published(gateway, "again.")
    assert {topic: sorted(payloads) for topic, payloads in found.items()} == {
        topic: sorted(expected(drop, topic))
        for topic in ("busy.one", "quiet.0", "quiet.1", "quiet.2", "quiet.3")
    }
    # Another prefix is another replay.
    other = replay.run(
        spark, early.where("topic = 'quiet.1'"), at, key="dev-key", prefix="other.", state=state
    )
    assert other.messages == len(expected(drop, "quiet.1", hours=1))


@pytest.mark.needs("java")
def test_what_the_gateway_refuses_is_told_in_a_sentence(
    spark: SparkSession, drop: Path, gateway: GatewayProcess
) -> None:
    chosen = replay.select(spark, str(drop), topics=["quiet.1"])
    with pytest.raises(ReplayFailed, match="invalid API key") as failed:
        replay.run(spark, chosen, gateway.places["blipmq"], key="wrong")
    assert failed.value.replayed.messages == 0
    with pytest.raises(ReplayFailed, match=r"cannot connect .*0 messages had been confirmed"):
        replay.run(spark, chosen, "127.0.0.1:1", key="dev-key")


@pytest.mark.parametrize("state", [False, True])
def test_a_second_try_of_a_task_is_refused_unless_there_is_a_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: bool
) -> None:
    monkeypatch.setattr(TaskContext, "get", lambda: SimpleNamespace(attemptNumber=lambda: 1))
    target = Target("127.0.0.1:1", "dev-key", state=str(tmp_path) if state else None)
    [result] = replay._publish(target)(iter([]))
    assert [row["failure"] is not None for row in result.to_pylist()] == ([] if state else [True])


def test_progress_is_kept_per_log(tmp_path: Path) -> None:
    target = Target("127.0.0.1:5555", "dev-key", state=str(tmp_path))
    progress = Progress(target.state, target, "a/b")
    assert not progress.has("n", LOG, 0)
    progress.advance("n", LOG, 7)
    progress.save()
    again = Progress(f"file://{tmp_path}", target, "a/b")
    assert again.has("n", LOG, 7)
    assert not again.has("n", LOG, 8)
    assert not again.has("m", LOG, 7)
    assert not Progress(target.state, target, "a").has("n", LOG, 7)


FILTERS = [
    "#",
    "*",
    "a",
    "a.*",
    "a.#",
    "#.b",
    "a.#.b",
    "*.b",
    "#.#",
    "a.*.#",
    "*.*",
    "a+.b",
    "#.a.#",
    "a..b",
    "",
]
TOPICS = ["a", "b", "a.b", "a.b.b", "a.c.d.b", "aa.b", "a+.b", "a..b", "c.a.d", "a.b\n", ".b", ""]


@pytest.mark.needs("java")
def test_filters_mean_what_they_mean_to_the_gateway(spark: SparkSession) -> None:
    topics = spark.createDataFrame([(topic,) for topic in TOPICS], "topic string")
    columns = [topic_matches(F.col("topic"), [one]).alias(f"f{n}") for n, one in enumerate(FILTERS)]
    for row in topics.select("topic", *columns).collect():
        found = {one for n, one in enumerate(FILTERS) if row[f"f{n}"]}
        assert found == {one for one in FILTERS if matches(one.encode(), row.topic.encode())}, row.topic
    assert topic_pattern("#") == r"(?s)\A.*\z"
