"""One supervisor with a dashboard, and queues in every condition that the pages show."""

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from forq.broker.flows import FlowJob, store_flow
from forq.client import Queue, new_job
from tests.support.drive.readme import free_port
from tests.support.drive.supervisor import HANDLERS, Forq
from tests.support.drive.wait import wait_until

ROOT = Path(__file__).resolve().parents[3]
WAITING = 250
LARGE_BYTES = 10 << 20
# Each fails the same way on purpose, so that the page of dead jobs has groups.
FAILURES = [
    *[("ConnectionError", "the payment provider did not answer within 30 s")] * 5,
    *[("CardDeclined", "insufficient funds")] * 3,
    ("ValueError", "invalid literal for int() with base 10: '12,50'"),
]

SETTINGS = """
capacity = 1000
[web]
listen = "127.0.0.1:{port}"

[queues.emails]
handler = "staged:handle"
path = "{handlers}"
keep_done = "1h"
[queues.emails.schedules.digest]
cron = "30 7 * * 1-5"
zone = "Europe/Berlin"
data = {{ template = "digest" }}
[queues.emails.schedules.clean-up]
every = "10m"
[queues.emails.schedules.old-report]
cron = "0 3 1 * *"

[queues.reports]
handlers = {{ "monthly.pdf" = "staged:handle" }}
handler = "staged:handle"
path = "{handlers}"
concurrency = 2
timeout = "0"

[queues.imports]
handler = "staged:handle"
path = "{handlers}"
max_stalls = 2

[queues.payments]
handlers = {{ charge = "staged:handle", refund = "staged:handle" }}
path = "{handlers}"
max_retries = 1
min_backoff = "20ms"

[queues.newsletter]
handler = "staged:handle"
path = "{handlers}"

[queues.reminders]
handler = "staged:handle"
path = "{handlers}"

[queues.webhooks]
handlers = {{ push = "staged:handle" }}
path = "{handlers}"
max_retries = 0
retry_lane_retries = 5
min_backoff = "500ms"
timeout = "0"

[queues.legacy]
handler = "{legacy}:handle"
path = "{directory}"

[queues.uploads]
handler = "staged:handle"
path = "{handlers}"
max_data = "64mb"
"""

# Queues that only tests need: `bench` is empty between tests, the others have hostile content.
TEST_SETTINGS = """
[queues.bench]
handler = "staged:handle"
handlers = {{ check = "staged:handle", scan = "staged:handle" }}
path = "{handlers}"
concurrency = 4
timeout = "0"
max_retries = 0
max_timeouts = 0
keep_done = "1h"

[queues.hostile]
handler = "staged:handle"
path = "{handlers}"
max_retries = 0
keep_done = "1h"
timeout = "0"
concurrency = 2

[queues.hostile-handler]
handler = "no_such_module:handle"
path = "{directory}/<img src=x onerror=window.__hit=1>{{{{7*7}}}}"
"""


class StagedForq(Forq):
    """A supervisor whose queues have a past hour. `host`: the name it runs under, if not that of this machine."""

    def __init__(self, host: str | None = None) -> None:
        super().__init__()
        self.cwd = ROOT
        self._host = host

    def program(self) -> list[str]:
        plain = [sys.executable, "-m", "tests.web.browser.charted_supervisor"]
        if self._host is None:
            return plain
        return ["unshare", "--uts", "sh", "-c", f'hostname {self._host} && exec "$0" "$@"', *plain]


class Stage:
    """The supervisor, and where its dashboard is."""

    def __init__(self, forq: Forq, port: int) -> None:
        self.forq = forq
        self.port = port
        self.root = f"http://127.0.0.1:{port}"
        self.client = forq.client()
        self.handlers = HANDLERS
        self._gates = 0

    def queue(self, name: str) -> Queue:
        return self.client.queue(name)

    def gate(self) -> Path:
        """A file that does not exist; a hanging job ends when it does."""
        self._gates += 1
        return self.forq.directory / f"gate-{self._gates}"

    def hang(self, queue: str = "bench", **fields: Any) -> tuple[str, Path]:
        """Starts a job that runs until its gate exists. Returns its id, and the gate."""
        gate = self.gate()
        identity = {name: fields.pop(name) for name in ("id", "identifier", "type") if name in fields}
        job = self.queue(queue).enqueue({"do": "hang", "gate": str(gate), **fields}, **identity)
        wait_until(lambda: self.queue(queue).job(job)["state"] == "active", what=f"job {job} runs")
        return job, gate

    def die(self, error: str = "ValueError", message: str = "no", *, queue: str = "bench", **identity: Any) -> str:
        """Makes a dead job, and returns its id."""
        job = self.queue(queue).enqueue({"do": "fail", "error": error, "message": message}, **identity)
        wait_until(lambda: self.state(queue, job) == "dead", what=f"job {job} is dead")
        return job

    def state(self, queue: str, job: str) -> str:
        return str(self.queue(queue).job(job)["state"])

    def counts(self, queue: str) -> Any:
        return self.queue(queue).status()

    def service(self, name: str) -> psutil.Process:
        """A process of the supervisor by its name in status, which has no pid while it is being restarted."""

        def pid() -> int | None:
            services = self.forq.status()["supervisor"]["services"]
            return next((each["pid"] for each in services if each["name"] == name), None)

        return psutil.Process(wait_until(pid, what=f"service {name} has a process"))


def fill(stage: Stage) -> None:
    """Puts every queue into its condition."""
    emails = stage.queue("emails")
    emails.enqueue_many({"to": f"user{number}@example.com", "template": "welcome"} for number in range(40))
    job = emails.enqueue({"result": {"sent": True, "message_id": "20261118.42"}, "lines": ["sent"]}, id="welcome-42")
    stage.hang(
        "reports",
        id="report-2026-10",
        identifier="october",
        type="monthly.pdf",
        fraction=0.4,
        text="page 12 of 30",
        lines=[
            "reading 31 days of orders",
            "31,204 orders, 118 refunds",
            *(f"page {number} of 30 is ready" for number in range(1, 12, 2)),
        ],
    )
    stage.hang("reports", id="report-2026-11", type="monthly.pdf", fraction=0.05, text="reading orders")
    stage.queue("reports").enqueue({"month": "2026-11", "again": True}, id="report-2026-11")
    stage.queue("imports").enqueue({"do": "crash", "lines": ["loading native library"]}, id="import-7")
    payments = stage.queue("payments")
    for number, (error, message) in enumerate(FAILURES):
        payments.enqueue(
            {"do": "fail", "error": error, "message": message, "order": 4000 + number},
            id=f"order-{4000 + number}",
            identifier=f"customer-{number % 4}",
            type="charge" if number % 2 else "refund",
        )
    newsletter = stage.queue("newsletter")
    newsletter.pause()
    newsletter.enqueue_many({"to": f"reader{number}@example.com"} for number in range(WAITING))
    reminders = stage.queue("reminders")
    for number in range(30):
        reminders.enqueue({"user": number}, id=f"reminder-{number}", run_in=3600 * (number + 1))
    # The retry lane waits while others do.
    webhooks = stage.queue("webhooks")
    webhooks.enqueue({"do": "fail", "error": "HTTPError", "message": "503"}, id="hook-1", type="push")
    wait_until(lambda: stage.counts("webhooks")["scheduled"] == 1, what="a webhook failed")
    stage.hang("webhooks", id="hook-2", type="push")
    webhooks.enqueue({"url": "https://example.com/hook"}, id="hook-3", type="push")
    stage.queue("uploads").pause()
    stage.queue("uploads").enqueue({"content": "x" * LARGE_BYTES}, id="large")
    fill_together(stage)
    wait_until(lambda: stage.counts("payments")["dead"] == len(FAILURES), what="failed payments are dead")
    wait_until(lambda: stage.counts("imports")["dead"] == 1, 60, "a crash is dead")
    wait_until(lambda: stage.counts("webhooks")["retry"] == 1, what="a job is in the retry lane")
    wait_until(lambda: stage.state("emails", job) == "done", what="mails are sent")
    stage.forq.call("schedule.pause", name="emails", key="old-report")


def fill_together(stage: Stage) -> None:
    """Jobs that wait for others, a flow and a batch. Their jobs of the queue emails are done, those of uploads wait."""
    stage.queue("reports").enqueue(
        {"year": 2026}, id="report-2026", type="monthly.pdf", after=["report-2026-10", "report-2026-11"]
    )
    flow = [
        FlowJob("emails", new_job({}, id="close-collect"), label="collect orders"),
        FlowJob("uploads", new_job({}, id="close-pdf"), (0,), label="make PDF"),
        FlowJob("uploads", new_job({}, id="close-csv"), (0,), label="make CSV"),
        FlowJob("reminders", new_job({}, id="close-publish"), (1, 2), "ended", label="publish"),
    ]
    store_flow(stage.client.link(), stage.client.prefix, "close-2026-11", flow)
    with stage.client.batch("uploads", id="gallery-7", on_end=new_job({})) as batch:
        for number in range(5):
            batch.enqueue("emails" if number < 3 else "uploads", {}, id=f"gallery-7-{number}")
    wait_until(lambda: stage.client.find_batch("uploads", "gallery-7").info()["done"] == 3, what="members are done")


@contextmanager
def staged(*, for_tests: bool = True, host: str | None = None) -> Iterator[Stage]:
    """`for_tests`: with the queues that only tests need."""
    port = free_port()
    forq = StagedForq(host)
    settings = SETTINGS + (TEST_SETTINGS if for_tests else "")
    # The error of a module that exists has a traceback, and a path of this machine.
    legacy = "legacy_jobs" if for_tests else "legacy"
    (forq.directory / "legacy_jobs.py").write_text("import no_such_module\n")
    forq.config.write_text(settings.format(port=port, handlers=HANDLERS, directory=forq.directory, legacy=legacy))
    try:
        forq.start()
        stage = Stage(forq, port)
        names = set(re.findall(r"^\[queues\.([a-z-]+)\]$", settings, re.MULTILINE))
        wait_until(lambda: names <= set(stage.client.queues()), what="the queues are there")
        fill(stage)
        yield stage
    finally:
        forq.remove()


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def utc_minute(at: float) -> str:
    """As the search form takes it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M")
