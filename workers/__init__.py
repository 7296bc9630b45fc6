"""What runs in a queue's children: the worker loop, one attempt, the handlers."""

assert __name__ == "forq.workers", "import this package as forq.workers"
