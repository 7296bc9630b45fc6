"""What the journal of a queue says is in it: its events applied from the beginning, each one only where it may occur.

The journal does not say whether a job that is not active waits or is scheduled: both are `ready` here.
"""

from forq.broker.journal import Event


class ImpossibleEvent(Exception):
    """The journal tells something that cannot follow what it told before."""


class Replay:
    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.active: dict[str, int] = {}  # id -> fence
        self.blocked: set[str] = set()
        self.dropped = 0
        self.sequence = 0

    def feed(self, event: Event) -> None:
        if event.sequence not in (self.sequence, self.sequence + 1):
            raise ImpossibleEvent(f"entry {event.sequence} follows {self.sequence}")
        self.sequence = event.sequence
        if event.job is not None:
            getattr(self, f"_{event.verb}")(event, event.job)

    def _enqueued(self, event: Event, job: str) -> None:
        self._demand(event, job not in self.ready and job not in self.active)
        self.ready.add(job)

    def _updated(self, event: Event, job: str) -> None:
        self._demand(event, job in self.ready)

    _promoted = _updated

    def _claimed(self, event: Event, job: str) -> None:
        self._demand(event, job in self.ready)
        self.ready.remove(job)
        self.active[job] = event.fence

    def _done(self, event: Event, job: str) -> None:
        self._demand(event, self.active.get(job) == event.fence)
        del self.active[job]

    _dead = _done

    def _retried(self, event: Event, job: str) -> None:
        self._done(event, job)
        self._demand(event, job not in self.blocked)
        self.ready.add(job)

    def _stalled(self, event: Event, job: str) -> None:
        self._demand(event, self.active.get(job) == event.fence)

    _timed_out = _suspected = _stalled

    def _returned(self, event: Event, job: str) -> None:
        self._demand(event, job in self.active and job not in self.blocked)
        del self.active[job]
        self.ready.add(job)

    def _blocked(self, event: Event, job: str) -> None:
        """Several fold into one."""
        self._demand(event, job in self.active)
        self.blocked.add(job)

    def _unblocked(self, event: Event, job: str) -> None:
        """Behind a job that is still active it updates that one, which then comes back; else it is a job now."""
        self._demand(event, job in self.blocked and job not in self.ready)
        self.blocked.remove(job)
        if job not in self.active:
            self.ready.add(job)

    def _cancelled(self, event: Event, job: str) -> None:
        """With a fence: the active job that was marked. Without: what is blocked behind it, else what waits."""
        if event.fence:
            self._done(event, job)
        elif job in self.active:
            self._demand(event, job in self.blocked)
            self.blocked.remove(job)
        else:
            self._demand(event, job in self.ready)
            self.ready.remove(job)

    def _dropped(self, event: Event, job: str) -> None:
        self.dropped += 1

    def _demand(self, event: Event, holds: bool) -> None:
        if not holds:
            raise ImpossibleEvent(f"{event} after ready={self.ready} active={self.active} blocked={self.blocked}")
