"""An S3 server on loopback."""

from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """Where it listens."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a bucket of this test's own, with {} where the path goes."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    name = f"bucket-{abs(hash(request.node.name))}"
    client = boto3.client("s3", endpoint_url=f"http://{s3_server}", region_name="us-east-1")
    client.create_bucket(Bucket=name)
    client.close()
    return f"s3://{name}/{{}}?endpoint_override={s3_server}&scheme=http&region=us-east-1"
