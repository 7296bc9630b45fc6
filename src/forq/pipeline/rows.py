"""Event rows as Parquet by queue and day."""

from collections.abc import Iterable
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import DateType, StructField, StructType

from forq.pipeline.schema import EVENTS

# As they are read: queue and day are in the names of the folders.
STORED = StructType([*EVENTS.fields, StructField("day", DateType())])
_DAY_MICROS = 86_400_000_000


def write_rows(rows: DataFrame, path: str) -> None:
    """Replaces what is at `path`. Days are those of UTC, whatever the session's zone is."""
    day = f.expr(f"date_from_unix_date(cast(unix_micros(time) div {_DAY_MICROS} as int))")
    (
        rows.withColumn("day", day)
        .write.mode("overwrite")
        .partitionBy("queue", "day")
        .option("compression", "zstd")
        .option("maxRecordsPerFile", 5_000_000)
        .parquet(path)
    )


def read_rows(spark: SparkSession, roots: Iterable[tuple[str, list[str]]]) -> DataFrame:
    """The rows in some folders (queue, day and the columns of EVENTS), given as a common base and folders below it."""
    tables = [
        spark.read.schema(STORED).option("basePath", base).parquet(*paths).select(STORED.fieldNames())
        for base, paths in roots
        if paths
    ]
    return reduce(DataFrame.union, tables) if tables else spark.createDataFrame([], STORED)
