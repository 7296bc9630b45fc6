"""Waiting for the end of a job: one look at it, by which whoever looks is also written down, and what is heard then."""

from dataclasses import dataclass
from typing import Any

from forq.broker.codes import OK, error_for
from forq.broker.dead import DeadJobs
from forq.broker.done import DoneJob, read_done
from forq.broker.keys import ended_channel, queue_base
from forq.broker.link import Link
from forq.broker.listening import Listener
from forq.broker.scripts import script
from forq.errors import UnknownJob
from forq.names import check_job_id, check_queue_name


@dataclass(frozen=True, slots=True)
class Place:
    """Which job is waited for: that of this epoch of its queue whose last attempt has this fence or a later one."""

    epoch: str
    fence: int


@dataclass(frozen=True, slots=True)
class Look:
    """`done`: it has ended so. Neither `live` nor done: it is not there (any more), or dead."""

    place: Place
    live: bool
    done: DoneJob | None


class Ends:
    """The end of one job, for one who waits for it."""

    def __init__(self, link: Link, prefix: str, queue: str, job_id: str) -> None:
        self.queue = check_queue_name(queue)
        self.job_id = check_job_id(job_id)
        self._link = link
        self._base = queue_base(prefix, queue)
        self._dead = DeadJobs(link, prefix, queue)

    def listener(self) -> Listener:
        return Listener(self._link.url, ended_channel(self._base, self.job_id), name="forq-waiter", exact=True)

    def look(self, place: Place | None, valid_ms: int) -> Look:
        """If it is live, its end is told to who listens, for so long. Safe to repeat. `place`: None the first time.

        UsageError if the queue keeps nothing, UnknownQueue if it is gone, also if it was made anew meanwhile.
        """
        since = ("", "") if place is None else (place.epoch, str(place.fence))
        reply = self._link.run(script("wait"), self._base, self.job_id, *since, valid_ms)
        if reply[0] != OK:
            raise error_for(self.queue, reply)
        at = Place(reply[2].decode(), int(reply[3]))
        return Look(at, reply[1] == b"live", read_done(reply[4]) if reply[1] == b"done" else None)

    def error_of_dead(self, place: Place) -> Any:
        """The error of this job if it is dead, else None."""
        try:
            shown = self._dead.show(self.job_id)
        except UnknownJob:
            return None
        return shown["error"] if shown["fence"] >= place.fence else None
