"""The checker detects violations: a small correct run is clean, and each planted violation is reported."""

from collections.abc import Callable
from typing import Any

import pytest

from forq.broker.journal import read_entry, unpack_entry
from forq.broker.keys import fail_queue
from tests.chaos.checker import violations
from tests.chaos.evidence import Evidence, Plan, QueueEnd
from tests.chaos.producer import REPEATS
from tests.support.drive.supervisor import Trace
from tests.support.models.journal_replay import Replay

# Two runs of a (the first was lost with its worker); b is done, c is dead, d is cancelled; g waits for h.
JOURNAL = [
    "created 0 9",
    "enqueued 0 a b c d",
    "cancelled 0 d",
    "claimed 11 1 a",
    "stalled 11 a signal\nreturned 0 a",
    "claimed 12 2 a\nclaimed 12 1 b c",
    "done 12 a 5 b 7\ndead 12 c 3 1 Permanent\nfailing 12 c",
    "enqueued 0 h g\nheld 0 g done h",
    "claimed 13 1 h",
    "done 13 h 4\nmet 0 g",
    "claimed 14 1 g",
    "done 14 g 3",
]
STEPS = ("start", "end")
FAIL_JOURNAL = ["created 0 9", "claimed 21 1 c:12", "done 21 c:12 4"]


def queue_end(name: str, texts: list[str], **more: Any) -> QueueEnd:
    chain, entries = Replay(), []
    for text in texts:
        entry = chain.next_entry(9, text)
        chain.epoch, chain.sequence, chain.hash = 9, chain.sequence + 1, unpack_entry(entry).hash
        entries.append(entry)
    events = [event for entry in entries for event in read_entry(entry, name)]
    return QueueEnd(name, entries, events, **more)


def traced(job: str, fence: int, pid: int, event: str, at: float) -> Trace:
    return Trace("kept", job, fence, pid, event, at, 0)


@pytest.fixture
def evidence() -> Evidence:
    done = {"a": 12, "b": 12, "h": 13, "g": 14}
    kept = queue_end("kept", JOURNAL, processed=4, failed=1, dead={"c@12"}, done=done)
    return Evidence(
        verdicts={**dict.fromkeys("abcdgh", ("kept", "ok")), "e": ("kept", "refused"), "f": ("kept", "unknown")},
        traces=[
            traced("a", 11, 1, "start", 1.0),
            traced("a", 11, 1, "slice", 1.5),
            traced("a", 12, 2, "start", 2.0),
            traced("a", 12, 2, "end", 2.5),
            traced("b", 12, 2, "start", 3.0),
            traced("b", 12, 2, "end", 3.5),
            traced("c", 12, 2, "start", 4.0),
            *(traced(job, fence, 2, event, fence + 0.5) for job, fence in (("h", 13), ("g", 14)) for event in STEPS),
            traced("c:12", 21, 3, "failed=c", 5.0),
        ],
        processors={1: {"one"}, 2: {"two"}, 3: {"two"}},
        plans={"h": Plan("flow", "done", ()), "g": Plan("flow", "done", ("h",))},
        taken_away={"d": {"yes cancel"}},
        logged={"kept": {"c"}},
        queues={
            "kept": kept,
            fail_queue("kept"): queue_end(fail_queue("kept"), FAIL_JOURNAL, processed=1),
            REPEATS: queue_end(REPEATS, ["created 0 9"]),
        },
        fired={"cut": ["connections"]},
    )


def test_a_correct_run_has_no_violations(evidence: Evidence) -> None:
    assert violations(evidence) == []


def replace_journal(evidence: Evidence, old: str, new: str) -> None:
    """Changes an event; the chain stays valid."""
    kept = evidence.queues["kept"]
    texts = [text.replace(old, new) for text in JOURNAL]
    kept.entries, kept.events = (changed := queue_end("kept", texts)).entries, changed.events


def delay_event(evidence: Evidence, verb: str, job: str) -> None:
    kept = evidence.queues["kept"]
    kept.events = [
        event._replace(time_us=event.time_us + 1) if (event.verb, event.job) == (verb, job) else event
        for event in kept.events
    ]


def cancel_after_a_death(evidence: Evidence) -> None:
    evidence.plans["g"] = Plan("flow", "dead", ("h",))
    replace_journal(evidence, "done 13 h 4\nmet 0 g", "dead 13 h 4 1 Permanent\ncancelled 0 g")


def _end(job: str, fence: int) -> Callable[[Trace], bool]:
    return lambda trace: (trace.job, trace.fence, trace.event) == (job, fence, "end")


def _without(evidence: Evidence, which: Callable[[Trace], bool]) -> None:
    evidence.traces = [trace for trace in evidence.traces if not which(trace)]


PLANTED: dict[str, tuple[Callable[[Evidence], object], str]] = {
    "lost": (lambda e: e.verdicts.update(x=("kept", "ok")), "kept: x (ok) has ended 0 times"),
    "refused and there": (lambda e: e.verdicts.update(a=("kept", "refused")), "kept: a (refused) has ended 1 times"),
    "refused and ran": (lambda e: e.traces.append(traced("e", 30, 2, "start", 9.0)), "e has run and was refused"),
    "ended twice": (
        lambda e: replace_journal(e, "done 12 a 5 b 7", "done 12 a 5 a 5 b 7"),
        "kept: a (ok) has ended 2 times",
    ),
    "nobody's": (lambda e: e.verdicts.pop("b"), "kept: b has ended and nobody enqueued it"),
    "nobody's run": (
        lambda e: e.traces.append(traced("x", 30, 2, "start", 9.0)),
        "x has run and nobody enqueued it",
    ),
    "done without its end": (
        lambda e: _without(e, _end("b", 12)),
        "kept: b is done under fence 12 and never came to an end with it",
    ),
    "kept under another fence": (
        lambda e: e.queues["kept"].done.update(b=13),  # type: ignore[union-attr]
        "kept: b is done under fence 12 and kept under 13",
    ),
    "counted twice": (
        lambda e: setattr(e.queues["kept"], "processed", 3),
        "kept: processed:count is 3, the journal has 4 done",
    ),
    "not among the dead": (
        lambda e: e.queues["kept"].dead.clear(),
        "kept: c@12 is dead and not among the dead",
    ),
    "no fail handler": (
        lambda e: _without(e, lambda trace: trace.event == "failed=c"),
        "kept: c is dead and its fail handler has not run",
    ),
    "not logged": (lambda e: e.logged.clear(), "kept: c is dead and not in the failed log"),
    "cancelled by nobody": (lambda e: e.taken_away.clear(), "kept: d is cancelled and nobody asked for it"),
    "cancelled and done": (
        lambda e: e.taken_away.update(b={"yes cancel"}),
        "kept: b was cancelled and ended as done",
    ),
    "overlap": (
        lambda e: e.traces.append(traced("a", 11, 1, "slice", 2.1)),
        "kept: a still ran under fence 11 in 1 at 2.100, when a later run had begun at 2.000",
    ),
    "fences that go back": (
        lambda e: e.traces.append(traced("b", 10, 1, "start", 9.0)),
        "kept: b still ran under fence 10 in 1 at 9.000, when a later run had begun at 3.000",
    ),
    "two with one fence": (
        lambda e: e.traces.append(traced("b", 12, 3, "start", 9.0)),
        "kept: b was run by two processes under fence 12",
    ),
    "met twice": (
        lambda e: replace_journal(e, "met 0 g", "met 0 g\nmet 0 g"),
        "g was held 1 times and left 2 times",
    ),
    "never met": (
        lambda e: replace_journal(e, "\nmet 0 g", ""),
        "g was held 1 times and left 0 times",
    ),
    "met too early": (
        lambda e: delay_event(e, "done", "h"),
        "g (done) was met when [] of 1 had ended; later ['done']",
    ),
    "met after a death": (
        lambda e: replace_journal(e, "done 13 h 4", "dead 13 h 4 1 Permanent"),
        "g (done) was met when ['dead'] of 1 had ended; later ['dead']",
    ),
    "unmet without a cause": (
        lambda e: replace_journal(e, "met 0 g", "unmet 0 g h dead"),
        "g is unmet, and all before it are done",
    ),
    "no run after a death": (
        cancel_after_a_death,
        "g did not run after a death",
    ),
    "a part of a flow": (
        lambda e: e.plans.update(z=Plan("flow", "done", ("g",))),
        "flow flow: h has run, and z was never stored",
    ),
    "a wrong result": (
        lambda e: e.traces.append(traced("g", 14, 2, "wrong=h:x", 14.6)),
        "kept: g got a wrong result: wrong=h:x",
    ),
    "dead without a fail job": (
        lambda e: replace_journal(e, "dead 12 c 3 1 Permanent\nfailing 12 c", "dead 12 c 3 0 Permanent"),
        "kept: c is dead without a fail job, and could have run",
    ),
    "left behind": (lambda e: e.queues["kept"].places.update(jobs={"z"}), "kept: jobs still has ['z']"),
    "a member without an end": (
        lambda e: e.queues[REPEATS].abandoned.add(("kept", "a")),
        f"{REPEATS}: a was a member of an abandoned batch, and its end does not count",
    ),
    "a hole in the journal": (
        lambda e: e.queues["kept"].entries.pop(2),
        "kept: the journal tells what cannot be",
    ),
    "still there by the journal": (
        lambda e: replace_journal(e, "cancelled 0 d", "updated 0 d"),
        "kept: by the journal there are still ['d']",
    ),
    "dropped": (lambda e: replace_journal(e, "cancelled 0 d", "dropped 0 d"), "kept: 1 ids were dropped"),
    "journal lost": (
        lambda e: setattr(e.queues["kept"], "journal_lost", 2),
        "kept: 2 entries of the journal were lost",
    ),
    "a process": (lambda e: e.survivors.append("77 of supervisor 1"), "process 77 of supervisor 1 is left"),
    "an exit": (lambda e: e.exits.append("supervisor 1 ended with 1"), "supervisor 1 ended with 1"),
    "a fault that slept": (lambda e: e.fired.update(zombie=[]), "fault zombie was armed and never fired"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted_violations_are_found(evidence: Evidence, what: str) -> None:
    plant, wanted = PLANTED[what]
    plant(evidence)
    assert any(said.startswith(wanted) for said in violations(evidence)), violations(evidence)


def test_a_member_that_was_never_stored_stays_in_an_abandoned_batch(evidence: Evidence) -> None:
    evidence.queues["kept"].abandoned.add(("kept", "never"))
    assert violations(evidence) == []


def test_a_zombie_may_continue_until_it_is_stopped(evidence: Evidence) -> None:
    evidence.traces.append(traced("a", 11, 1, "end", 2.1))
    evidence.evicted = {"one"}
    assert violations(evidence) == []


def test_a_job_settled_by_a_zombie_is_found(evidence: Evidence) -> None:
    evidence.traces.append(traced("a", 11, 1, "end", 2.1))
    evidence.evicted = {"one"}
    replace_journal(evidence, "done 12 a 5 b 7", "done 11 a 5\ndone 12 b 7")
    assert any("the journal tells what cannot be" in said for said in violations(evidence))
