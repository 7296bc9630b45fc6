"""Waiting for the end of a job: one look at it, by which whoever looks is also written down, and what is heard then."""

from dataclasses import dataclass
from typing import Any, Literal

from forq.broker.codes import OK, error_for
from forq.broker.dead import DeadJobs
from forq.broker.done import DoneJob, read_done, why_not_kept
from forq.broker.keys import ended_channel, queue_base
from forq.broker.link import Link
from forq.broker.listening import Listener
from forq.broker.scripts import script
from forq.errors import UnknownJob
from forq.names import check_job_id, check_queue_name
from forq.redis_address import database_of

State = Literal["live", "done", "dead", "cancelled", "gone"]


@dataclass(frozen=True, slots=True)
class Place:
    """Which job is waited for: that of this epoch of its queue that has this mark ('': the one that ended last)."""

    epoch: str
    mark: str

    @property
    def enqueued_ms(self) -> int | None:
        enqueued = self.mark.partition("-")[2]
        return int(enqueued) if enqueued.isdigit() else None


@dataclass(frozen=True, slots=True)
class Look:
    """What has become of the job. `fence`: of its last attempt, if it is done or dead. `done`: None if nothing of it is
    kept. Gone: nobody knows how it ended, or it is dead since long."""

    place: Place
    state: State
    fence: int = 0
    done: DoneJob | None = None


class Ends:
    """The end of one job, for one who waits for it."""

    def __init__(self, link: Link, prefix: str, queue: str, job_id: str) -> None:
        self.queue = check_queue_name(queue)
        self.job_id = check_job_id(job_id)
        self._link = link
        self._base = queue_base(prefix, queue)
        self._dead = DeadJobs(link, prefix, queue)

    def listener(self) -> Listener:
        channel = ended_channel(self._base, database_of(self._link.url), self.job_id)
        return Listener(self._link.url, channel, name="forq-waiter", exact=True)

    def look(self, place: Place | None, valid_ms: int) -> Look:
        """If it is live, its end is told to who listens, for so long. Safe to repeat. `place`: None the first time.

        UsageError if the queue keeps nothing, UnknownQueue if it is gone, also if it was made anew meanwhile.
        """
        since = ("", "") if place is None else (place.epoch, place.mark)
        reply = self._link.run(script("wait"), self._base, self.job_id, *since, valid_ms)
        if reply[0] != OK:
            raise error_for(self.queue, reply)
        state, epoch, mark = (part.decode() for part in reply[1:4])
        fence = int(reply[4]) if len(reply) > 4 else 0
        return Look(Place(epoch, mark), state, fence, read_done(reply[5]) if len(reply) > 5 else None)

    def why_not_kept(self) -> str:
        """Why there is no result of a job that has ended, and what to do about it."""
        return why_not_kept(self._link, self._base, self.queue)

    def error_of_dead(self, fence: int) -> Any:
        """The error that the job died of in this attempt; None if nothing is kept of it."""
        shown = self._shown(f"{self.job_id}@{fence}")
        return None if shown is None else shown["error"]

    def error_of_last_dead(self, place: Place, after: int = 0) -> Any:
        """The error of the last dead job of this id, if it is the one of `place` and died in an attempt after that."""
        shown = self._shown(self.job_id)
        if shown is None or shown["fence"] <= after:
            return None
        other = place.enqueued_ms is not None and round(shown["enqueued_at"] * 1000) != place.enqueued_ms
        return None if other else shown["error"]

    def _shown(self, reference: str) -> dict[str, Any] | None:
        try:
            return self._dead.show(reference)
        except UnknownJob:
            return None
