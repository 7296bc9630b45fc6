"""In place of the server of a peer, for tests that need none."""

from benchmarks.servers import Counter


class NoServer:
    """Has used as many seconds of CPU time as `used_seconds` says."""

    address = ""

    def __init__(self) -> None:
        self.used_seconds = 0.0

    def start(self) -> None: ...

    def remove(self) -> None: ...

    def flush(self) -> None: ...

    def cpu_seconds(self) -> float:
        return self.used_seconds

    def used_memory(self) -> int:
        return 0

    def requests(self) -> Counter:
        raise NotImplementedError
