"""The checker: what must hold after a run, whatever happened. Each rule returns a sentence per violation.

1. Every stored id has ended exactly once; one of unknown outcome at most once; a refused one never.
2. A done job has run to its end under the fence of its record; a dead one has reached its fail handler and the failed
   log; a cancelled one was cancelled on request.
3. Fences of an id grow from run to run, and no run continues while a later one does, except in zombies: processes of
   a supervisor that others have evicted.
4. No key has leftovers, and the counts match the journal.
5. The journal is a chain of possible events.
6. A held job leaves its place exactly once: it is met, unmet or cancelled, as the ends of what it waits for demand, and
   after them; it gets their results. A flow runs completely, or nothing of it runs.
7. No process is left; supervisors end normally; every armed fault has fired.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from forq.broker.journal import Event
from forq.broker.keys import fail_queue, main_queue
from tests.chaos.evidence import Evidence, QueueEnd
from tests.chaos.producer import NO_FLOW, REPEATS
from tests.support.drive.supervisor import Trace
from tests.support.models.journal_replay import ImpossibleEvent, Replay

_ENDS = ("done", "dead", "cancelled", "released")
_MOST_SHOWN = 300


def violations(evidence: Evidence) -> list[str]:
    return [said[:_MOST_SHOWN] for rule in _RULES for said in rule(evidence)]


def _ended(evidence: Evidence) -> Iterator[str]:
    for queue in _dispatched_once(evidence):
        ends = _ends_of(queue)
        for job, (where, verdict) in evidence.verdicts.items():
            if where != queue.name:
                continue
            times = len(ends.pop(job, []))
            allowed = {"ok": (1,), "unknown": (0, 1), "refused": (0,)}[verdict]
            if times not in allowed:
                yield f"{queue.name}: {job} ({verdict}) has ended {times} times"
        for job in ends:
            yield f"{queue.name}: {job} has ended and nobody enqueued it"
    known = set(evidence.verdicts)
    for job in {t.job for t in evidence.traces if not t.event.startswith("failed=")} - known:
        yield f"{job} has run and nobody enqueued it"
    refused = {job for job, (_, verdict) in evidence.verdicts.items() if verdict == "refused"}
    for job in refused & {t.job for t in evidence.traces} - _repeated(evidence):
        yield f"{job} has run and was refused"


def _done(evidence: Evidence) -> Iterator[str]:
    finished = {(t.queue, t.job, t.fence) for t in evidence.traces if t.event == "end"}
    for queue in _main_queues(evidence):
        done = [event for event in queue.events if event.verb == "done"]
        for event in done:
            if (queue.name, event.job, event.fence) not in finished:
                yield f"{queue.name}: {event.job} is done under fence {event.fence} and never came to an end with it"
            kept = None if queue.done is None else queue.done.get(str(event.job))
            removed = "yes remove" in evidence.taken_away.get(str(event.job), ())
            if queue.done is not None and kept != event.fence and not removed:
                yield f"{queue.name}: {event.job} is done under fence {event.fence} and kept under {kept}"
    for queue in evidence.queues.values():
        times = sum(event.verb == "done" for event in queue.events)
        if queue.processed != times:
            yield f"{queue.name}: processed:count is {queue.processed}, the journal has {times} done"


def _dead(evidence: Evidence) -> Iterator[str]:
    handled = {t.event.removeprefix("failed=") for t in evidence.traces if t.event.startswith("failed=")}
    for queue in _main_queues(evidence):
        dead = [event for event in queue.events if event.verb == "dead"]
        for event in dead:
            if f"{event.job}@{event.fence}" not in queue.dead:
                yield f"{queue.name}: {event.job}@{event.fence} is dead and not among the dead"
            if not event.fail_job:
                if "unmet" not in {each.verb for each in queue.events if each.job == event.job}:
                    yield f"{queue.name}: {event.job} is dead without a fail job, and could have run"
            elif event.job not in handled and not _died(evidence.queues[fail_queue(queue.name)], event):
                yield f"{queue.name}: {event.job} is dead and its fail handler has not run"
            if event.job not in evidence.logged.get(queue.name, ()):
                yield f"{queue.name}: {event.job} is dead and not in the failed log"
        if not queue.failed == len(dead) == len(queue.dead):
            yield f"{queue.name}: {len(dead)} died, failed:count is {queue.failed}, {len(queue.dead)} are kept"


def _died(fail_jobs: QueueEnd, event: Event) -> bool:
    """Whether the fail job itself is dead: every process that ran it was killed."""
    return any(each.verb == "dead" and each.job == f"{event.job}:{event.fence}" for each in fail_jobs.events)


def _cancelled(evidence: Evidence) -> Iterator[str]:
    for queue in _dispatched_once(evidence):
        ends = _ends_of(queue)
        for job, events in ends.items():
            if (
                events[0].verb == "cancelled"
                and job not in evidence.taken_away
                and not _may_be_withdrawn(evidence, job)
            ):
                yield f"{queue.name}: {job} is cancelled and nobody asked for it"
        for job, answers in evidence.taken_away.items():
            if "yes cancel" in answers and job in ends and ends[job][0].verb != "cancelled":
                yield f"{queue.name}: {job} was cancelled and ended as {ends[job][0].verb}"


def _may_be_withdrawn(evidence: Evidence, job: str) -> bool:
    """Whether nobody else had to ask: it waited for a death, or the flow or batch could not be stored completely."""
    plan = evidence.plans.get(job)
    return plan is not None and (plan.when == "dead" or evidence.verdicts[job][1] != "ok")


def _flows(evidence: Evidence) -> Iterator[str]:
    by_job: dict[str, list[Event]] = defaultdict(list)
    ends: dict[str, Event] = {}
    for queue in _dispatched_once(evidence):
        for event in queue.events:
            if event.verb in _ENDS:
                ends[str(event.job)] = event
            if event.job in evidence.plans:
                by_job[str(event.job)].append(event)
    for job, events in by_job.items():
        times = Counter(event.verb for event in events)
        left = times["met"] + times["unmet"] or times["cancelled"]
        if times["held"] and (times["held"], left) != (1, 1):
            yield f"{job} was held {times['held']} times and left {left} times"
        yield from _wrong_release(evidence, job, events, ends)
    yield from _incomplete_flows(evidence, ends)
    for trace in evidence.traces:
        if trace.event.startswith("wrong="):
            yield f"{trace.queue}: {trace.job} got a wrong result: {trace.event}"


def _wrong_release(evidence: Evidence, job: str, events: list[Event], ends: dict[str, Event]) -> Iterator[str]:
    plan, verbs = evidence.plans[job], {event.verb for event in events}
    known = [ends[each] for each in plan.needed if each in ends]
    hows = [event.verb for event in known]
    met = next((event for event in events if event.verb == "met"), None)
    if met and plan.needed:
        before = [event.verb for event in known if event.time_us <= met.time_us]
        right = {
            "done": before == ["done"] * len(plan.needed),
            # One that was never stored is lost.
            "ended": before == hows,
            "dead": "dead" in before,
        }
        if not right[plan.when]:
            yield f"{job} ({plan.when}) was met when {before} of {len(plan.needed)} had ended; later {hows}"
    # What was stored with an unknown outcome may be withdrawn.
    if evidence.verdicts[job][1] != "ok":
        return
    if "unmet" in verbs and hows == ["done"] * len(plan.needed):
        yield f"{job} is unmet, and all before it are done"
    if plan.when == "dead" and "dead" in hows and "met" not in verbs and job not in evidence.taken_away:
        yield f"{job} did not run after a death"


def _incomplete_flows(evidence: Evidence, ends: dict[str, Event]) -> Iterator[str]:
    flows: dict[str, list[str]] = defaultdict(list)
    for job, plan in evidence.plans.items():
        flows[plan.flow].append(job)
    for flow, jobs in flows.items():
        missing = [job for job in jobs if job not in ends]
        # One that waits for any end may run once those before it are lost.
        ran = [job for job in jobs if job in ends and ends[job].verb == "done" and evidence.plans[job].when == "done"]
        if flow != NO_FLOW and missing and ran:
            yield f"flow {flow}: {ran[0]} has run, and {missing[0]} was never stored"


def _runs(evidence: Evidence) -> Iterator[str]:
    zombies = {pid for pid, names in evidence.processors.items() if names & evidence.evicted}
    by_job: dict[tuple[str, str], dict[tuple[int, int], list[Trace]]] = defaultdict(lambda: defaultdict(list))
    for trace in evidence.traces:
        by_job[trace.queue, trace.job][trace.fence, trace.pid].append(trace)
    for (queue, job), runs in by_job.items():
        fences = [fence for fence, _ in runs]
        for fence in {fence for fence in fences if fences.count(fence) > 1}:
            yield f"{queue}: {job} was run by two processes under fence {fence}"
        ordered = sorted(runs.items())
        for number, ((fence, pid), traces) in enumerate(ordered):
            later = min((t.time for _, others in ordered[number + 1 :] for t in others), default=float("inf"))
            if traces[-1].time > later and pid not in zombies:
                yield (
                    f"{queue}: {job} still ran under fence {fence} in {pid} at {traces[-1].time:.3f}, "
                    f"when a later run had begun at {later:.3f}"
                )


def _places(evidence: Evidence) -> Iterator[str]:
    for queue in evidence.queues.values():
        for place, ids in queue.places.items():
            yield f"{queue.name}: {place} still has {sorted(ids)[:5]}"
        for name, job in sorted(queue.abandoned):
            if any((event.verb, event.job) == ("enqueued", job) for event in evidence.queues[name].events):
                yield f"{queue.name}: {job} was a member of an abandoned batch, and its end does not count"


def _journal(evidence: Evidence) -> Iterator[str]:
    for queue in evidence.queues.values():
        if queue.journal_lost:
            yield f"{queue.name}: {queue.journal_lost} entries of the journal were lost"
        fail_jobs = None
        if queue.name != main_queue(queue.name):
            parent = evidence.queues[main_queue(queue.name)]
            fail_jobs = {f"{event.job}:{event.fence}" for event in parent.events if event.verb == "failing"}
        replay = Replay(fail_jobs)
        try:
            replay.read_all(queue.entries)
        except ImpossibleEvent as exc:
            yield f"{queue.name}: the journal tells what cannot be: {exc}"
            continue
        if replay.dropped:
            yield f"{queue.name}: {replay.dropped} ids were dropped"
        if left := [*replay.ready, *replay.active, *replay.blocked, *replay.held, *replay.batches]:
            yield f"{queue.name}: by the journal there are still {left[:5]}"


def _ends_in_order(evidence: Evidence) -> Iterator[str]:
    for survivor in evidence.survivors:
        yield f"process {survivor} is left"
    yield from evidence.exits
    for fault, hits in evidence.fired.items():
        if not hits:
            yield f"fault {fault} was armed and never fired"


_RULES = (_ended, _done, _dead, _cancelled, _flows, _runs, _places, _journal, _ends_in_order)


def _main_queues(evidence: Evidence) -> list[QueueEnd]:
    return [queue for queue in evidence.queues.values() if queue.name == main_queue(queue.name)]


def _dispatched_once(evidence: Evidence) -> list[QueueEnd]:
    return [queue for queue in _main_queues(evidence) if queue.name != REPEATS]


def _repeated(evidence: Evidence) -> set[str]:
    return {job for job, (queue, _) in evidence.verdicts.items() if queue == REPEATS}


def _ends_of(queue: QueueEnd) -> dict[str, list[Event]]:
    ends: dict[str, list[Event]] = {}
    for event in queue.events:
        if event.verb in _ENDS:
            ends.setdefault(str(event.job), []).append(event)
    return ends
