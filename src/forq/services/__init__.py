"""The supervisor's own children: pulse, scribe, clerk, logger and metrics."""

assert __name__ == "forq.services", "import this package as forq.services"
