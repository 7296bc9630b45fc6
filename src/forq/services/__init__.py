"""The services pulse, scribe, clerk, warden and metrics. The logger is in forq.output, the bridge in forq.bridge."""

assert __name__ == "forq.services", "import this package as forq.services"
