"""What running jobs say of their progress: shown in the scoreboard at once, told to Redis by a thread of its own.

The thread is started by the first report, so that processes whose jobs report nothing have none, and it sleeps until
the next one. It is not the minder: that has to hear the supervisor also while Redis hangs.
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

# At most ten writes per second and job.
PAUSE_SECONDS = 0.1
AWAY_SECONDS = 1.0
CALL_TIMEOUT_SECONDS = 3.0

log = logging.getLogger("forq")

Report = tuple[str, int, float, str]  # job id, fence, fraction, text


class JobReporter:
    """Of one worker. `latest` is what its job said last: it may change at any time, and is replaced as a whole."""

    def __init__(self, slot: Slot, queue: str, rouse: Callable[[], None]) -> None:
        self.queue = queue
        self.worker = slot.worker
        self.latest: Report | None = None
        self.told: Report | None = None
        self._slot = slot
        self._rouse = rouse
        self._forked = False

    def report(self, position: int, job_id: str, fence: int, fraction: float, text: str) -> None:
        if not self._forked and self._slot.show_progress(position, fraction, text):
            self.latest = (job_id, fence, fraction, text)
            self._rouse()

    def forget(self) -> None:
        """In a process that a handler forks: it shares the slot, but not the thread that tells Redis."""
        self._forked = True


class ProgressTeller:
    """Tells Redis the latest of each worker of this process, with a connection that no handler waits for."""

    def __init__(self, url: str, prefix: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._url = url
        self._link: Link | None = None
        self._prefix = prefix
        self._sleep = sleep
        self._reporters: list[JobReporter] = []
        self._roused = False
        self._started = False
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._away = False

    def reporter(self, slot: Slot, queue: str) -> JobReporter:
        reporter = JobReporter(slot, queue, self._rouse)
        os.register_at_fork(after_in_child=reporter.forget)
        self._reporters.append(reporter)
        return reporter

    def _rouse(self) -> None:
        """Costs next to nothing while the thread has yet to look at what was reported before."""
        if self._roused:
            return
        self._roused = True
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="progress", daemon=True).start()
        self._bell.set()

    def _run(self) -> None:
        while True:
            self._bell.wait()
            self._bell.clear()
            # Before it looks: whatever is reported from here on rings again.
            self._roused = False
            try:
                self._sleep(PAUSE_SECONDS if self.tell() else AWAY_SECONDS)
            except Exception:  # a fault of ours must not end the thread: nobody would tell Redis any more
                log.exception("cannot tell the progress of jobs")

    def tell(self) -> bool:
        """Whether Redis has got all that is new. If not, it is tried again, with what is the latest then."""
        if self._link is None:
            self._link = Link(self._url, name="forq-progress", timeout_seconds=CALL_TIMEOUT_SECONDS)
        for reporter in self._reporters:
            latest = reporter.latest
            if latest is None or latest is reporter.told:
                continue
            try:
                report_progress(self._link, self._prefix, reporter.queue, reporter.worker, *latest)
            except RedisUnavailable as exc:
                if not self._away:
                    log.warning("redis is gone, progress is told later queue=%s error=%s", reporter.queue, exc)
                self._away = True
                self._bell.set()
                return False
            except ForqError as exc:  # the queue was deleted, Redis is out of memory: the next report may do better
                log.warning("progress was refused queue=%s job=%s error=%s", reporter.queue, latest[0], exc)
            reporter.told = latest
        self._away = False
        return True
