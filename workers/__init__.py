"""Code that runs in a queue's processes: the worker loop, one attempt, the handlers."""

assert __name__ == "forq.workers", "import this package as forq.workers"
