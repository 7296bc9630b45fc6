"""Progress reports of running jobs: shown in the scoreboard at once, sent to Redis by a thread.

The thread starts with the first report, so processes whose jobs report nothing have none. The minder cannot do this: it
must read the leash even while Redis hangs.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

from forq.broker.claim import report_progress
from forq.broker.link import Link
from forq.errors import ForqError, RedisUnavailable
from forq.procs.scoreboard import Slot

# At most ten writes per second.
MIN_INTERVAL_SECONDS = 0.1
RETRY_SECONDS = 1.0
CALL_TIMEOUT_SECONDS = 3.0

log = logging.getLogger("forq")

Report = tuple[str, int, float, str]  # job id, fence, fraction, text


class ProgressReporter:
    """One per worker. `latest` is its last report: it may change at any time, and is replaced as a whole."""

    def __init__(self, slot: Slot, queue: str, wake: Callable[[], None]) -> None:
        self.queue = queue
        self.worker = slot.worker
        self.latest: Report | None = None
        self.sent: Report | None = None
        self._slot = slot
        self._wake = wake
        self._forked = False

    def report(self, position: int, job_id: str, fence: int, fraction: float, text: str) -> None:
        if not self._forked and self._slot.show_progress(position, fraction, text):
            self.latest = (job_id, fence, fraction, text)
            self._wake()

    def disable(self) -> None:
        """Called in a process that a handler forked: it shares the slot, but does not have the thread."""
        self._forked = True


class ProgressSender:
    """Sends the latest report of each worker of this process, over a connection of its own."""

    def __init__(self, url: str, prefix: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._url = url
        self._link: Link | None = None
        self._prefix = prefix
        self._sleep = sleep
        self._reporters: list[ProgressReporter] = []
        self._woken = False
        self._started = False
        self._lock = threading.Lock()
        self._wake_event = threading.Event()
        self._redis_lost = False

    def reporter(self, slot: Slot, queue: str) -> ProgressReporter:
        reporter = ProgressReporter(slot, queue, self._wake)
        os.register_at_fork(after_in_child=reporter.disable)
        self._reporters.append(reporter)
        return reporter

    def _wake(self) -> None:
        """Costs almost nothing while the thread has not read the earlier reports yet."""
        if self._woken:
            return
        self._woken = True
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="progress", daemon=True).start()
        self._wake_event.set()

    def _run(self) -> None:
        while True:
            self._wake_event.wait()
            self._wake_event.clear()
            # Before the reports are read: a later report wakes the thread again.
            self._woken = False
            try:
                self._sleep(MIN_INTERVAL_SECONDS if self.send_latest() else RETRY_SECONDS)
            except Exception:  # a bug must not end the thread: no progress would be sent any more
                log.exception("failed to send the progress of jobs")

    def send_latest(self) -> bool:
        """False if Redis is unavailable: the next call sends the reports that are the latest then."""
        if self._link is None:
            self._link = Link(self._url, name="forq-progress", timeout_seconds=CALL_TIMEOUT_SECONDS)
        for reporter in self._reporters:
            latest = reporter.latest
            if latest is None or latest is reporter.sent:
                continue
            try:
                report_progress(self._link, self._prefix, reporter.queue, reporter.worker, *latest)
            except RedisUnavailable as exc:
                if not self._redis_lost:
                    log.warning("redis is gone; progress is sent later queue=%s error=%s", reporter.queue, exc)
                self._redis_lost = True
                self._wake_event.set()
                return False
            except ForqError as exc:  # the queue is deleted, or Redis is out of memory: the next report may succeed
                log.warning("progress report refused queue=%s job=%s error=%s", reporter.queue, latest[0], exc)
            reporter.sent = latest
        self._redis_lost = False
        return True
