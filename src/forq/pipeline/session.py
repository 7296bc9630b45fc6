"""The one place that makes a Spark session: on this machine out of the box, on a cluster under spark-submit."""

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from forq.pipeline.java import provide_java

# C1 only: a third less of a start, which is most of what a short run costs.
_QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOGGING = f"-Dlog4j2.configurationFile=file:{Path(__file__).with_name('log4j2.properties')}"


def under_spark_submit() -> bool:
    """Then master, Java and Python are those that it was given."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def spark_session(app: str, **settings: str) -> SparkSession:
    """The session that is there already (spark-submit, a test), else a new one with these settings."""
    present = SparkSession.getActiveSession()
    if present is not None:
        return present
    builder = SparkSession.builder.appName(f"forq {app}")
    if not under_spark_submit():
        provide_java()
        # Else the workers would run whatever `python3` is on PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        builder = (
            builder.master("local[*]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config(_JAVA_OPTIONS, f"{settings.pop(_JAVA_OPTIONS, _QUICK_START)} {_LOGGING}")
            .config("spark.sql.shuffle.partitions", str(2 * (os.cpu_count() or 1)))
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
        )
    # Days and times in history are the server's, in UTC, wherever they are read.
    builder = builder.config("spark.sql.session.timeZone", "UTC")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
