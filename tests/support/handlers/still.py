"""A handler that does nothing and imports nothing: what a process has is forq's own."""


def noop(data: object, job: object) -> None:
    return None
