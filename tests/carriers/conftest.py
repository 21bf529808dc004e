"""One broker of each kind for all tests of this directory: RabbitMQ takes seconds to start."""

from collections.abc import Iterator

import pytest

from tests.carriers.brokers import Mosquitto, Rabbit


@pytest.fixture(scope="package")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rabbit]:
    with Rabbit(tmp_path_factory.mktemp("rabbit")) as running:
        yield running


@pytest.fixture(scope="package")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path_factory.mktemp("mosquitto")) as running:
        yield running
