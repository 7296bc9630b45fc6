"""Job history on Spark: ingest of the journals, audit, report and replay. The only folder that imports pyspark."""

assert __name__ == "forq.pipeline", "import this package as forq.pipeline"
