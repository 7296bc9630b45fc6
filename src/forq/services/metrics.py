"""The metrics process: /metrics for Prometheus and /healthz for probes, from one look per second at most.

1. Who asks gets the last look if it is younger than a second, else a new one; nothing is looked at for nobody.
2. A queue is at fault only if it was at two looks: see AGAIN_SECONDS.
3. It ends when the supervisor does.
"""

import json
import socket
import time

from forq import exits
from forq.health import Fault
from forq.procs.liveness import may_take
from forq.procs.loop import service_loop
from forq.procs.process import Context
from forq.procs.scoreboard import Tallies
from forq.services.desk import Desk
from forq.services.health import faults_in
from forq.services.http_server import Asked, HttpServer, Page
from forq.services.metrics_look import Look, Looker

LOOK_SECONDS = 1.0
# A process that died is replaced by then, a queue that is being made is served. A job that was scheduled looks as if
# it had waited all the time at the moment it becomes due; by then it has begun.
AGAIN_SECONDS = 0.5

# A supervisor and a Redis that answer late, twice.
LOOK_MOST_SECONDS = 15.0

INDEX = b"forq\n\n/metrics   for Prometheus\n/healthz   200 if jobs are consumed, else 503 with the reasons\n"


def run_metrics(context: Context, listener: socket.socket, leash: socket.socket) -> int:
    """The entry point: returns the process's exit code."""
    loop = service_loop()
    Desk(loop, leash, {})
    HttpServer(loop, listener, Pages(context).answer)
    loop.run()
    return exits.STOPPED


class Pages:
    """What is answered to whom."""

    def __init__(self, context: Context) -> None:
        self._health_seconds = context.health_seconds
        self._looker = Looker(
            url=context.url,
            prefix=context.prefix,
            control_socket=context.control_socket,
            board=context.scoreboard,
            tallies=context.tallies or Tallies(),
        )
        self._look: Look | None = None
        self._looked_at = 0.0
        self._faults: list[Fault] = []
        self._rendered: dict[str, Page] = {}

    def answer(self, asked: Asked) -> Page:
        if asked.path == "/metrics":
            return self._metrics(asked.headers.get("accept", ""))
        if asked.path == "/healthz":
            return self._healthz()
        if asked.path == "/":
            return Page(INDEX)
        return Page(b"there is /metrics and /healthz\n", 404)

    def _healthz(self) -> Page:
        self._look_again()
        body = {"ok": not self._faults, "faults": [fault.describe() for fault in self._faults]}
        text = json.dumps(body, separators=(",", ":")) + "\n"
        return Page(text.encode(), 503 if self._faults else 200, "application/json")

    def _metrics(self, accept: str) -> Page:
        # Imported where it is needed: it is an extra, and no other process should pay for it.
        from forq.services.metrics_page import render

        look = self._look_again()
        if accept not in self._rendered:
            body, content_type = render(look, healthy=not self._faults, accept=accept)
            # Of many clients that each ask for something else only the last is remembered.
            self._rendered = {accept: Page(body, content_type=content_type)}
        return self._rendered[accept]

    def _look_again(self) -> Look:
        if self._look is not None and time.monotonic() - self._looked_at < LOOK_SECONDS:
            return self._look
        may_take(LOOK_MOST_SECONDS)
        known = _queues_in(self._faults)
        look = self._looker.look()
        faults = faults_in(look, self._health_seconds)
        seen = _queues_in(faults)
        if seen - known:
            time.sleep(AGAIN_SECONDS)
            look = self._looker.look()
            faults = [fault for fault in faults_in(look, self._health_seconds) if fault.queue in {None, *seen}]
        self._look, self._faults, self._rendered = look, faults, {}
        self._looked_at = time.monotonic()
        return look


def _queues_in(faults: list[Fault]) -> set[str]:
    return {fault.queue for fault in faults if fault.queue is not None}
