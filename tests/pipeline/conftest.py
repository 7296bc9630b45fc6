"""One Spark session for all tests of the pipeline: its start takes longer than most tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from forq.pipeline.session import spark_session

# Generous: a timeout within a call breaks the session for all later tests.
TIMEOUT_SECONDS = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = spark_session("tests", **{"spark.sql.shuffle.partitions": "2"})
    try:
        yield session
    finally:
        session.stop()
