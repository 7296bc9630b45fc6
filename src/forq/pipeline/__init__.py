"""The data pipeline on Spark: journal to history, audit, report and replay. The only folder that imports pyspark."""

assert __name__ == "forq.pipeline", "import this package as forq.pipeline"
