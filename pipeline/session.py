"""The one place that makes a Spark session: on this machine out of the box, on a cluster under spark-submit."""

import os
import sys

from pyspark.sql import SparkSession

from forq.pipeline.java import provide_java

# C1 only: a third less of a start, which is most of what a short run costs.
_QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def spark_session(app: str, **settings: str) -> SparkSession:
    """The session that is there already (spark-submit, a test), else a new one with these settings."""
    present = SparkSession.getActiveSession()
    if present is not None:
        return present
    builder = SparkSession.builder.appName(f"forq {app}")
    if "SPARK_ENV_LOADED" not in os.environ and "FORQ_SPARK_MASTER" not in os.environ:
        provide_java()
        # Else the workers would run whatever `python3` is on PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        builder = (
            builder.master("local[*]")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.extraJavaOptions", _QUICK_START)
            .config("spark.sql.shuffle.partitions", str(2 * (os.cpu_count() or 1)))
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
        )
    if master := os.environ.get("FORQ_SPARK_MASTER"):
        builder = builder.master(master)
    # Days and times in history are the server's, in UTC, wherever they are read.
    builder = builder.config("spark.sql.session.timeZone", "UTC")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
