"""A handler that does nothing and imports nothing, so that a process contains forq alone."""


def noop(data: object, job: object) -> None:
    return None
