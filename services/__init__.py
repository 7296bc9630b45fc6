"""The supervisor's own children that talk to Redis: pulse, scribe and clerk."""

assert __name__ == "forq.services", "import this package as forq.services"
