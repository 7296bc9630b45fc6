"""A well-behaved client in a separate process: sends a request at intervals and records each response time."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

EVERY_SECONDS = 0.01


def main(path: str, request: str, out: str) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    answers = sock.makefile("rb")
    with open(out, "w", buffering=1) as times:
        while True:
            began = time.perf_counter()
            sock.sendall(request.encode() + b"\n")
            json.loads(answers.readline())
            times.write(f"{(time.perf_counter() - began) * 1000:.3f}\n")
            time.sleep(EVERY_SECONDS)


class Pinger:
    """The process. `take`: the times (ms) since the last call, sorted."""

    def __init__(self, path: Path, request: dict[str, object], out: Path) -> None:
        self._out = out
        self._taken = 0
        out.touch()
        self.process = subprocess.Popen([sys.executable, __file__, str(path), json.dumps(request), str(out)])

    def take(self) -> list[float]:
        times = [float(line) for line in self._out.read_text().splitlines()[self._taken : -1]]
        self._taken += len(times)
        return sorted(times)

    def wait_for(self, count: int) -> list[float]:
        """Waits for `count` times from now on."""
        self.take()
        deadline = time.monotonic() + 60
        times: list[float] = []
        while len(times) < count and time.monotonic() < deadline:
            time.sleep(0.05)
            times += self.take()
        assert len(times) >= count, f"{len(times)} pings in a minute"
        return sorted(times)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def shown(times: list[float]) -> str:
    if not times:
        return "no pings"
    at = [times[min(len(times) - 1, int(len(times) * part))] for part in (0.5, 0.99)]
    return f"p50 {at[0]:.1f} ms, p99 {at[1]:.1f} ms, max {times[-1]:.1f} ms of {len(times)} pings"


if __name__ == "__main__":
    main(*sys.argv[1:])
