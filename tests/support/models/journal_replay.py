"""Rebuilds a queue from its journal: applies the entries from the beginning and rejects impossible events.

It knows nothing of the queue but the journal, and checks that the entries form a chain.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forq.broker.journal import Entry, Event, entry_hash, pack_entry, read_entry


class ImpossibleEvent(Exception):
    """An event of the journal cannot follow the events before it."""


@dataclass
class Dependency:
    """A job that a held one waits for. `source`: ID, or 'ID blocked' for the enqueue behind an active job; None: not
    looked up yet. `how` it ended; '?': the journal does not know."""

    name: str
    source: str | None = None
    how: str | None = None


@dataclass
class Hold:
    """`others`: it also waits for batches, or for jobs of other queues, whose ends this journal does not tell."""

    when: str
    dependencies: list[Dependency] = field(default_factory=list)
    others: bool = False

    def may_run(self) -> bool:
        hows = [each.how for each in self.dependencies]
        if self.when == "dead":
            return self.others or "dead" in hows or "?" in hows
        return all(how in (("done", "released", "?") if self.when == "done" else (how or "",)) for how in hows)


class Replay:
    """`fail_jobs`, for a fail queue: the ids in `failing` events of its queue's journal, where these jobs begin."""

    def __init__(self, fail_jobs: set[str] | None = None) -> None:
        self.epoch = self.sequence = 0
        self.hash = ""
        self.paused = False
        self.dropped = 0
        # Whether the scripts of a test forget ends sooner than their journal.
        self.forgets = False
        self.births: set[str] = set()  # of fail jobs
        self._unborn = set(fail_jobs or ())
        self._clear()

    def _clear(self) -> None:
        self.ready: dict[str, int | None] = {}  # id -> due (ms) while it is scheduled
        self.active: dict[str, int] = {}  # id -> fence
        self.attempts: dict[str, int] = {}  # of the active ones
        self.marked: set[str] = set()
        self.options: dict[str, str] = {}  # of ids, also ended ones
        self.blocked: set[str] = set()
        self.batches: set[str] = set()  # those that have not ended
        self.archived: set[str] = set()  # id@fence
        self.held: dict[str, Hold] = {}
        # How jobs ended, since the queue has had held ones: the scripts did not remember it before.
        self.ends: dict[str, str] = {}
        self._has_held = False
        self.deleted = False

    def pass_time(self, ms: int) -> None:
        """Accounts for a test that made scheduled jobs due earlier."""
        self.ready = {job: due_ms and due_ms - ms for job, due_ms in self.ready.items()}

    def read_all(self, entries: Iterable[Mapping[bytes, bytes]]) -> "Replay":
        for fields in entries:
            self.read(fields)
        return self

    def read(self, fields: Mapping[bytes, bytes]) -> None:
        """Applies one entry."""
        events = list(read_entry(fields))
        first = events[0]
        self._check_chain(first)
        self._to_come: dict[str, tuple[str, ...]] = {}  # id -> the verbs of which one must follow in this entry
        self._fail_job: tuple[str, int] | None = None
        # A user may run a job before its time (run_now), in a call that does nothing else.
        self._may_be_early = len(events) == 1 and first.actor == "-"
        # Ids in the order in which this entry stores them: a job waits for what was there before it.
        self._stored: list[str] = []
        for position, event in enumerate(events):
            self._demand(event, event.position == position)
            if event.verb in ("met", "unmet", "cancelled"):
                self._look_up_dependencies()
            getattr(self, f"_{event.verb}")(event, event.job)
        self._look_up_dependencies()
        self._demand(events[-1], not self._to_come and self._fail_job is None)

    def next_entry(self, epoch: int, text: str) -> dict[bytes, bytes]:
        """Builds an entry that continues the chain, with any text."""
        sequence, time_us, actor = self.sequence + 1, 1_790_000_000_000_000, "-"
        hashed = entry_hash(self.hash, epoch, sequence, time_us, actor, text)
        return pack_entry(Entry(epoch, sequence, time_us, actor, hashed, text))

    def _check_chain(self, first: Event) -> None:
        if first.epoch != self.epoch:
            self._demand(first, first.verb == "created" and (self.deleted or not self.epoch))
            self.epoch, self.sequence, self.hash = first.epoch, 0, ""
        self._demand(first, first.sequence == self.sequence + 1)
        self.sequence += 1
        hashed = (self.hash, first.epoch, first.sequence, first.time_us, first.actor, first.entry or "")
        self.hash = entry_hash(*hashed)
        self._demand(first, first.hash == self.hash)

    def _created(self, event: Event, _: None) -> None:
        self._demand(event, event.sequence == 1 and event.cause == str(event.epoch))
        self._clear()
        self.paused = False

    def _deleted(self, event: Event, _: None) -> None:
        held = len(self.ready) + len(self.active) + len(self.blocked) + len(self.held) + len(self.archived)
        self._demand(event, held <= int(event.cause or 0) <= held + len(self.births))
        self._clear()
        self.deleted = True

    def _paused(self, event: Event, _: None) -> None:
        self._demand(event, not self.paused)
        self.paused = True

    def _batch_opened(self, event: Event, _: None) -> None:
        self._demand(event, event.cause not in self.batches)
        self.batches.add(event.cause or "")

    def _batch_ended(self, event: Event, _: None) -> None:
        batch = (event.cause or "").partition(" ")[0]
        self._demand(event, batch in self.batches)
        self.batches.remove(batch)

    def _resumed(self, event: Event, _: None) -> None:
        self._demand(event, self.paused)
        self.paused = False

    def _enqueued(self, event: Event, job: str) -> None:
        self._demand(event, not self._lives(job))
        self.options.pop(job, None)
        self.ready[job] = None
        self._stored.append(job)

    def _updated(self, event: Event, job: str) -> None:
        if job in self.held:
            self._to_come[job] = ("held",)
            return
        self._demand(event, job in self.ready)
        self.ready[job] = None

    def _lives(self, job: str) -> bool:
        return job in self.ready or job in self.active or job in self.held

    def _held(self, event: Event, job: str) -> None:
        when, *names = (event.cause or "").split(" ")
        when, others = when.removesuffix("+"), when.endswith("+")
        self._has_held = True
        self._demand(event, len(set(names)) == len(names) and (names != [] or others or job in self._to_come))
        if self._to_come.pop(job, None) is None:
            self._demand(event, job in self._stored and self.ready.pop(job, 0) is None)
            self.held[job] = Hold(when, [Dependency(name) for name in names], others)
            return
        # Those that have ended may be listed still, until pulse has told this job.
        hold, listed = self.held[job], set(names)
        self._demand(event, hold.when == when and (hold.others or not others))
        known = {each.name: each for each in hold.dependencies}
        self._demand(event, listed <= set(known))
        self._demand(event, all(each.how or name in listed for name, each in known.items()))

    def _look_up_dependencies(self) -> None:
        """Once all jobs of an entry are stored."""
        for job, hold in self.held.items():
            for each in hold.dependencies:
                if each.source is None:
                    self._look_up(job, each)

    def _look_up(self, job: str, dependency: Dependency) -> None:
        name = dependency.name
        is_new = name in self._stored and self._stored.index(name) < self._stored.index(job)
        if name in self.blocked:
            dependency.source = f"{name} blocked"
        elif is_new or (self._lives(name) and name not in self._stored):
            dependency.source = name
        else:
            dependency.source, dependency.how = "", "?" if self.forgets else self.ends.get(name, "?")

    def _ends(self, source: str, how: str) -> None:
        if self._has_held:
            self.ends[source] = how
        for hold in self.held.values():
            for each in hold.dependencies:
                if each.source == source and not each.how:
                    each.how = how

    def _moves(self, job: str) -> None:
        """The enqueue that was blocked is now this job."""
        for hold in self.held.values():
            for each in hold.dependencies:
                if each.source == f"{job} blocked":
                    each.source = job

    def _met(self, event: Event, job: str) -> None:
        self._demand(event, job in self.held and self.held[job].may_run())
        del self.held[job]
        self.ready[job] = None

    def _unmet(self, event: Event, job: str) -> None:
        name, how = (event.cause or " ").split(" ")
        self._demand(event, job in self.held and how not in ("done", "released"))
        hold = self.held[job]
        self._demand(event, hold.when == "done" or how == "abandoned")
        known = {each.name: each.how for each in hold.dependencies}
        self._demand(event, hold.others if name == "-" else known.get(name) in (how, "?"))
        del self.held[job]
        self.ready[job] = None
        self._to_come[job] = ("claimed",)

    def _scheduled(self, event: Event, job: str) -> None:
        self._demand(event, job in self.ready and event.due_us is not None)
        self.ready[job] = (event.due_us or 0) // 1000

    def _promoted(self, event: Event, job: str) -> None:
        due_ms = self.ready.get(job)
        self._demand(event, due_ms is not None and (self._may_be_early or due_ms <= event.time_us // 1000))
        self.ready[job] = None

    def _claimed(self, event: Event, job: str) -> None:
        if job in self._unborn:
            self._unborn.remove(job)
            self.ready[job] = None
        self._demand(event, job in self.ready and self.ready[job] is None and job not in self.active)
        self._demand(event, event.fence > max(self.active.values(), default=0) or event.fence in self.active.values())
        del self.ready[job]
        self.active[job] = event.fence
        self.attempts[job] = event.attempt or 0
        if job in self._to_come:
            self._follows(event, job)
            self._to_come[job] = ("dead",)

    def _marked(self, event: Event, job: str) -> None:
        self._demand(event, self.active.get(job) == event.fence and job not in self.marked)
        self.marked.add(job)

    def _done(self, event: Event, job: str) -> None:
        self._leaves_its_worker(event, job)
        self._ends(job, event.verb)

    _released = _done

    def _leaves_its_worker(self, event: Event, job: str) -> None:
        self._demand(event, self.active.get(job) == event.fence and job not in self._to_come)
        del self.active[job], self.attempts[job]
        self.marked.discard(job)

    def _retried(self, event: Event, job: str) -> None:
        self._follows(event, job)
        self._demand(event, job not in self.marked and job not in self.blocked and bool(event.cause))
        self._leaves_its_worker(event, job)
        self.ready[job] = None

    def _snoozed(self, event: Event, job: str) -> None:
        self._follows(event, job)
        self._demand(event, job not in self.marked and job not in self.blocked)
        self._leaves_its_worker(event, job)
        self.ready[job] = None

    def _stalled(self, event: Event, job: str) -> None:
        self._demand(event, self.active.get(job) == event.fence and job not in self.marked and bool(event.cause))
        self._demand(event, job not in self._to_come)
        self._to_come[job] = ("returned", "merged")

    _timed_out = _suspected = _interrupted = _stalled

    def _returned(self, event: Event, job: str) -> None:
        self._follows(event, job)
        self._demand(event, job in self.active and job not in self.marked and job not in self.blocked)
        del self.active[job], self.attempts[job]
        self.ready[job] = None

    def _blocked(self, event: Event, job: str) -> None:
        """Several dispatches fold into one."""
        self._demand(event, job in self.active)
        self.blocked.add(job)

    def _merged(self, event: Event, job: str) -> None:
        before = self._to_come.get(job)
        self._follows(event, job)
        self._demand(event, job in self.active and job in self.blocked and job not in self.marked)
        self.blocked.remove(job)
        self._moves(job)
        self._to_come[job] = ("returned",) if before else ("returned", "retried", "snoozed")

    def _withdrawn(self, event: Event, job: str) -> None:
        self._demand(event, job in self.active and job in self.blocked)
        self.blocked.remove(job)
        self._ends(f"{job} blocked", "cancelled")

    def _options(self, event: Event, job: str) -> None:
        self._demand(event, self._lives(job) and bool(event.cause))
        self.options[job] = event.cause or ""

    def _unblocked(self, event: Event, job: str) -> None:
        self.options.pop(job, None)
        self._demand(event, job in self.blocked and not self._lives(job))
        self.blocked.remove(job)
        self.ready[job] = None
        self._moves(job)

    def _cancelled(self, event: Event, job: str) -> None:
        if event.fence:
            self._leaves_its_worker(event, job)
        elif job in self.held:
            del self.held[job]
        else:
            self._demand(event, job in self.ready)
            del self.ready[job]
        self._ends(job, "cancelled")

    def _dead(self, event: Event, job: str) -> None:
        self._demand(event, job not in self.marked and f"{job}@{event.fence}" not in self.archived)
        self._demand(event, bool(event.cause) and event.fail_job is not None)
        if job in self._to_come:
            self._follows(event, job)
        self._leaves_its_worker(event, job)
        self._ends(job, "dead")
        self.archived.add(f"{job}@{event.fence}")
        self._demand(event, self._fail_job is None)
        self._fail_job = (job, event.fence) if event.fail_job else None

    def _failing(self, event: Event, job: str) -> None:
        self._demand(event, self._fail_job == (job, event.fence))
        self._fail_job = None
        self.births.add(f"{job}:{event.fence}")

    def _revived(self, event: Event, job: str) -> None:
        self._forgotten(event, job)
        self._enqueued(event, job)

    def _forgotten(self, event: Event, job: str) -> None:
        self._demand(event, f"{job}@{event.fence}" in self.archived)
        self.archived.remove(f"{job}@{event.fence}")

    _discarded = _forgotten

    def _dropped(self, event: Event, job: str) -> None:
        self.dropped += 1
        self.ready.pop(job, None)
        self._ends(job, "dropped")

    def _follows(self, event: Event, job: str) -> None:
        """Checks that an event announced for this job is the one that follows."""
        self._demand(event, event.verb in self._to_come.pop(job, (event.verb,)))

    def _demand(self, event: Event, holds: bool) -> None:
        if not holds:
            known = {name: value for name, value in vars(self).items() if not name.startswith("_")}
            raise ImpossibleEvent(f"{event} after {known}")
