"""One Spark session for all tests of the pipeline: its start takes longer than most of them."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from forq.pipeline.session import spark_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = spark_session("tests", **{"spark.sql.shuffle.partitions": "2"})
    try:
        yield session
    finally:
        session.stop()
