"""Each rule finds impossible events and wrong Redis states, even if the chain of hashes is right.

All changed histories are audited in one run.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from forq.broker.journal import Event
from forq.pipeline.audit.findings import GAP, VIOLATION
from forq.pipeline.audit.redis_state import QueueState, RedisState
from forq.pipeline.audit.run import Auditor
from tests.pipeline.histories import STEP_US, WrittenEntry, frame_of, merged_redis_states, rows_of, sample_history

Entries = list[WrittenEntry]


def replaced(old: str, new: str) -> Callable[[Entries], Entries]:
    """Replaces `old` by `new` in the only entry that has it, and removes the entry if it becomes empty."""

    def change(entries: Entries) -> Entries:
        changed = [entry.with_text(old, new) if old in entry.text else entry for entry in entries]
        assert sum(old in entry.text for entry in entries) == 1, f"{old!r} is not in exactly one entry"
        return [entry for entry in changed if entry.text]

    return change


def added(after: str, *texts: str, queue: str = "q") -> Callable[[Entries], Entries]:
    """Adds entries after the one that has `after`."""

    def change(entries: Entries) -> Entries:
        (at,) = [number for number, entry in enumerate(entries) if after in entry.text]
        epoch = max(entry.epoch for entry in entries[: at + 1] if entry.queue == queue)
        more = [WrittenEntry(queue, epoch, entries[at].time_us + 1 + number, text) for number, text in enumerate(texts)]
        return [*entries[: at + 1], *more, *entries[at + 1 :]]

    return change


def moved_in_time(text: str, microseconds: int) -> Callable[[Entries], Entries]:
    return lambda entries: [
        replace(entry, time_us=entry.time_us + microseconds) if text in entry.text else entry for entry in entries
    ]


def written_by(text: str, actor: str) -> Callable[[Entries], Entries]:
    return lambda entries: [replace(entry, actor=actor) if text in entry.text else entry for entry in entries]


# The rule that must find the change, and the change.
PLANTED: list[tuple[str, Callable[[Entries], Entries]]] = [
    # A job ends twice, or a run does.
    ("paths", replaced("done 101 a 10 b -", "done 101 a 10 b - b -")),
    ("paths", added("done 101 a 10", "done 101 a 10")),
    ("paths", added("cancelled 0 d c", "cancelled 0 c")),
    ("paths", added("dead 106 d", "done 106 d 5")),
    ("conservation", added("done 101 a 10", "done 101 a 10")),
    ("conservation", added("cancelled 0 d c", "cancelled 0 c")),
    # Wrong fences.
    ("paths", replaced("done 101 a 10 b -", "done 100 a 10 b -")),
    ("paths", replaced("retried 102 d 30", "retried 101 d 30")),
    ("paths", replaced("stalled 103 e", "stalled 102 e")),
    ("paths", replaced("timed_out 104 e", "timed_out 103 e")),
    ("paths", replaced("suspected 107 g", "suspected 106 g")),
    ("paths", replaced("interrupted 107 h", "interrupted 17 h")),
    ("paths", replaced("marked 104 s", "marked 103 s")),
    ("paths", replaced("cancelled 104 s", "cancelled 103 s")),
    ("paths", replaced("cancelled 104 s", "cancelled 0 s")),
    ("paths", replaced("cancelled 0 d c", "cancelled 104 d c")),
    ("paths", replaced("claimed 108 1 g", "claimed 107 1 g")),
    ("paths", replaced("claimed 106 1 d", "claimed 90 1 d")),
    ("paths", replaced("claimed 104 2 e d", "claimed 99 2 e d")),
    # Wrong attempts.
    ("paths", replaced("claimed 104 2 e d", "claimed 104 3 e d")),
    ("paths", replaced("claimed 105 3 e", "claimed 105 2 e")),
    ("paths", replaced("claimed 106 1 d", "claimed 106 2 d")),
    ("paths", replaced("claimed 103 2 d", "claimed 103 1 d")),
    ("paths", replaced("claimed 102 1 c d", "claimed 102 2 c d")),
    # Steps that cannot follow.
    ("paths", replaced("enqueued 0 s\n", "enqueued 0 s s\n")),
    ("paths", added("claimed 101 1 a b", "enqueued 0 a")),
    ("paths", added("claimed 101 1 a b", "updated 0 a")),
    ("paths", added("claimed 101 1 a b", "cancelled 0 a")),
    ("paths", added("claimed 101 1 a b", "revived 100 a")),
    ("paths", added("enqueued 0 a b c d e", "promoted 0 a")),
    ("paths", added("enqueued 0 a b c d e", "returned 0 a")),
    ("paths", added("enqueued 0 a b c d e", "done 100 a 5")),
    ("paths", added("enqueued 0 a b c d e", "marked 100 a")),
    ("paths", added("enqueued 0 a b c d e", "scheduled 0 a 77")),
    ("paths", replaced("promoted 0 s d", "promoted 0 d")),
    ("paths", replaced("claimed 101 1 a b c d", "claimed 101 1 a b c d n")),
    ("paths", replaced("\nreturned 0 g h", "\nreturned 0 g")),
    ("paths", replaced("\nreturned 0 e s d", "\nreturned 0 s d")),
    ("paths", added("dropped 0 z", "stalled 107 i signal_9")),
    ("paths", replaced("timed_out 104 e timeout 50\nreturned 0 e", "timed_out 104 e timeout 50")),
    # What is blocked.
    ("paths", replaced("\nmerged 0 e", "")),
    ("paths", replaced("\nunblocked 0 c", "")),
    ("paths", replaced("withdrawn 0 s\n", "")),
    ("paths", replaced("\nunblocked 0 c", "\nunblocked 0 c d")),
    ("paths", added("claimed 101 1 a b", "withdrawn 0 a")),
    ("paths", added("claimed 101 1 a b", "merged 0 a")),
    ("paths", added("enqueued 0 a b c d e", "blocked 0 a")),
    ("paths", added("done 101 a 10", "blocked 0 a")),
    ("paths", added("dropped 0 z", "merged 0 i")),
    # The archive.
    ("paths", replaced("discarded 106 d", "discarded 105 d")),
    ("paths", added("discarded 106 d", "discarded 106 d")),
    ("paths", replaced("forgotten 105 e", "forgotten 104 e")),
    ("paths", replaced("revived 104 d", "revived 103 d")),
    ("paths", added("cancelled 0 d c", "revived 104 d")),
    # Fail jobs.
    ("fail_jobs", replaced("\nfailing 104 d", "")),
    ("fail_jobs", replaced("dead 104 d 40 1", "dead 104 d 40 0")),
    ("fail_jobs", replaced("failing 106 d\n", "failing 106 d\nfailing 106 d\n")),
    ("fail_jobs", replaced("failing 108 g", "failing 107 g")),
    ("fail_jobs", replaced("dead 203 e:105 9 0", "dead 203 e:105 9 1")),
    ("fail_jobs", replaced("claimed 201 1 d:104", "claimed 201 1 d:103")),
    ("fail_jobs", replaced("claimed 204 1 d:106", "claimed 204 1 m:106")),
    ("paths", added("claimed 201 1 d:104", "done 201 d:104 7", queue="q#fail")),
    # Released jobs.
    ("paths", replaced("released 302 m -", "released 301 m -")),
    ("paths", added("enqueued 0 m n o", "released 300 m 5", queue="r")),
    ("paths", added("released 302 m", "released 302 m 4", queue="r")),
    ("paths", added("released 302 m", "returned 0 m", queue="r")),
    ("paths", replaced("released 301 m 12\nunblocked 0 m", "released 301 m 12")),
    ("paths", replaced("released 301 m 12\nunblocked 0 m", "returned 0 m")),
    ("paths", replaced("claimed 303 1 o\nretried 303 o", "claimed 303 1 o\nretried 302 o")),
    ("conservation", added("released 302 m", "released 302 m 4", queue="r")),
    ("conservation", replaced("released 302 m -\n", "")),
    (
        "overlap",
        added(
            "released 302 m",
            *("enqueued 0 x", "claimed 3021 1 x", "claimed 3022 1 x", "released 3021 x 1", "released 3022 x 1"),
            queue="r",
        ),
    ),
    # Lost records.
    ("states", added("enqueued 0 a b c d e", "dropped 0 a")),
    ("states", added("dropped 0 z", "dropped 0 j")),
    ("conservation", added("dropped 0 z", "dropped 0 j")),
    # Jobs missing from the journal, or added to it.
    ("conservation", replaced("enqueued 0 g h i j k", "enqueued 0 g h i j")),
    ("conservation", replaced("enqueued 0 g h i j k", "enqueued 0 g h i j k m")),
    ("conservation", replaced("done 21 x 10 y 10", "done 21 x 10")),
    ("conservation", replaced("deleted 0 4", "deleted 0 3")),
    ("conservation", replaced("deleted 0 0", "deleted 0 1")),
    ("conservation", replaced("discarded 106 d", "")),
    ("conservation", added("dropped 0 z", "claimed 109 1 h")),
    ("conservation", added("dropped 0 z", "withdrawn 0 i")),
    ("states", added("dropped 0 z", "updated 0 l")),
    # Two runs of one id at once: in one epoch of the queue, and in two.
    (
        "overlap",
        added("dropped 0 z", "enqueued 0 m", "claimed 110 1 m", "claimed 111 1 m", "done 110 m 1", "done 111 m 1"),
    ),
    ("overlap", added("dropped 0 z", "claimed 109 1 h", "claimed 110 1 h", "done 109 h 1", "done 110 h 1")),
    ("overlap", added("dropped 0 z", "claimed 109 1 i", "done 107 i 1", "done 109 i 1")),
    ("overlap", moved_in_time("done 11 x 10", 50 * STEP_US)),
    ("overlap", moved_in_time("claimed 102 1 c d", 50 * STEP_US)),
    # Options of jobs: too many retries, in the main lane.
    ("options", written_by("claimed 403 3 oa", "w7")),
    ("options", written_by("claimed 405 2 oa", "w7")),
    ("options", replaced("options 0 oa r=1,b=1:5", "options 0 oa b=1:5,r=0")),
    ("options", replaced("snoozed 406 oh 5\nclaimed 407 1 oh", "retried 406 oh 5 KeyError\nclaimed 407 2 oh")),
    # Started after the expiry.
    ("options", replaced("options 0 oe x=999000", "options 0 oe x=1000,k=5")),
    ("options", replaced("claimed 410 1 of\ndead 410 of - 0 Expired", "claimed 410 1 of")),
    ("options", replaced("revived 410 of\noptions 0 of r=3", "revived 410 of\noptions 0 of r=3,x=700")),
    ("options", replaced("options 0 og -\n", "")),
    # Malformed, or without the event that sets them.
    ("options", replaced("options 0 oh r=0", "options 0 oh r=none")),
    ("options", replaced("options 0 oh r=0", "options 0 oh r=0,r=1")),
    ("options", replaced("options 0 oh r=0", "options 0 oh r=0,z=1")),
    ("options", replaced("options 0 oh r=0", "options 0 oh t=1,b=1::2")),
    ("options", added("enqueued 0 oa ob oe", "options 0 ob r=1", queue="own")),
    ("options", replaced("options 0 og -\nupdated 0 og", "options 0 og -")),
    # Held jobs: the order of their steps.
    ("paths", replaced("\nheld 0 fb done fa", "\nmet 0 fb")),
    ("paths", replaced("\nmet 0 fb\nclaimed 502 1 fb", "\nclaimed 502 1 fb")),
    ("paths", replaced("\nmet 0 gc\n", "\nmet 0 gc gc\n".replace("gc gc", "gc\nmet 0 gc"))),
    ("paths", replaced("unmet 0 gb ga dead\n", "")),
    ("paths", replaced("unmet 0 gb ga dead\n", "unmet 0 gb ga dead\nmet 0 gb\n")),
    ("paths", added("enqueued 0 fa fb fc fd", "held 0 fa done fb", queue="flow")),
    ("paths", added("claimed 501 1 fa", "held 0 fa done fb", queue="flow")),
    ("paths", added("enqueued 0 fa fb fc fd", "promoted 0 fb", queue="flow")),
    ("paths", replaced("unmet 0 ib ia cancelled\nclaimed 520 1 ib", "unmet 0 ib ia cancelled\ncancelled 0 ib")),
    ("dependencies", replaced("updated 0 fc\nheld 0 fc done fa fb", "updated 0 fc")),
    ("dependencies", added("enqueued 0 fa fb fc fd", "updated 0 fa\nheld 0 fa done fb", queue="flow")),
    ("dependencies", replaced("updated 0 fc\nheld 0 fc done fa fb", "updated 0 fc\nheld 0 fc done fa fb fd")),
    ("dependencies", replaced("\ndead 520 ib - 0 DependencyFailed", "\ndone 520 ib 5")),
    ("dependencies", replaced("\nclaimed 520 1 ib\ndead 520 ib - 0 DependencyFailed", "")),
    # Ready although a dependency has not ended, or has ended otherwise.
    ("dependencies", replaced("done 501 fa 5\nmet 0 fb", "met 0 fb\ndone 501 fa 5")),
    ("dependencies", replaced("held 0 ge done gd", "held 0 ge done gd gc")),
    ("dependencies", added("claimed 501 1 fa", "met 0 fd", queue="flow")),
    ("dependencies", replaced("held 0 gc ended gb fa", "held 0 gc done gb fa")),
    ("dependencies", replaced("held 0 gc ended gb fa", "held 0 gc ended gb fa gf ge")),
    ("dependencies", replaced("held 0 gd dead gb", "held 0 gd dead fb")),
    ("dependencies", added("enqueued 0 ia ib ic id ie", "met 0 ic", queue="flow")),
    ("dependencies", replaced("held 0 hf ended hc", "held 0 hf done hc")),
    (
        "dependencies",
        replaced("done 506 ha 5\nunblocked 0 ha\nmet 0 hb", "done 506 ha 5\nunblocked 0 ha\nmet 0 hb\nmet 0 hd"),
    ),
    # Dead without a reason, or for another one than the journal has.
    ("dependencies", replaced("unmet 0 gb ga dead", "unmet 0 gb ga cancelled")),
    ("dependencies", replaced("unmet 0 gb ga dead", "unmet 0 gb gc dead")),
    ("dependencies", replaced("cancelled 0 ia\nunmet 0 ib", "dropped 0 ia\nunmet 0 ib")),
    ("dependencies", replaced("cancelled 0 ia\nunmet 0 ib", "unmet 0 ib")),
    ("dependencies", replaced("held 0 gb done ga", "held 0 gb ended ga")),
    ("dependencies", replaced("dead 504 ga 5 0 KeyError\n", "done 504 ga 5\n")),
    ("dependencies", added("enqueued 0 ga gb gc gd ge", "unmet 0 ge gd dead", queue="flow")),
    # Held although everything that it waits for has ended, or enough of it.
    ("dependencies", replaced("held 0 ic done id", "held 0 ic done ha")),
    ("dependencies", replaced("held 0 ic done id", "held 0 ic ended ga gb")),
    ("dependencies", replaced("held 0 ie ended ic id", "held 0 ie dead ga ic id")),
    ("dependencies", added("cancelled 0 ia", "cancelled 0 id", queue="flow")),
    ("conservation", replaced("cancelled 0 ia\n", "cancelled 0 ie\ncancelled 0 ia\n")),
    ("conservation", replaced("enqueued 0 ia ib ic id ie\n", "enqueued 0 ia ib ic id ie if\n")),
    ("states", replaced("\nheld 0 ie ended ic id", "")),
    # Batches.
    ("batches", replaced("batch_ended 0 B1 done 1\n", "")),
    ("batches", replaced("batch_ended 0 B1 done 1", "batch_ended 0 B1 failed 1")),
    ("batches", added("batch_opened 0 B1", "batch_opened 0 B1", queue="flow")),
    ("batches", added("batch_ended 0 B1 done 1", "batch_ended 0 B1 done 1", queue="flow")),
    # Time, beginning and end.
    ("chain", moved_in_time("claimed 102 1 c d", -5 * STEP_US)),
    ("chain", added("deleted 0 0", "resumed 0", queue="old")),
    ("chain", added("dropped 0 z", "created 0 5")),
    ("chain", replaced("created 0 1000000", "paused 0")),
]


def _at_the_end_of(rows: list[Event], redis_state: RedisState) -> RedisState:
    heads = {row.queue: row for row in rows if row.hash is not None}
    queues = {
        key: replace(
            queue_state, epoch=heads[key[1]].epoch, sequence=heads[key[1]].sequence, hash=heads[key[1]].hash or ""
        )
        for key, queue_state in redis_state.queues.items()
    }
    return replace(redis_state, queues=queues)


def with_queue(name: str, **changes: object) -> Callable[[RedisState], RedisState]:
    def change(redis_state: RedisState) -> RedisState:
        queues = dict(redis_state.queues)
        queues[0, name] = replace(queues[0, name], **changes)  # type: ignore[arg-type]
        return replace(redis_state, queues=queues)

    return change


def without(queue: str, job: str, place: str) -> Callable[[RedisState], RedisState]:
    def change(redis_state: RedisState) -> RedisState:
        kept = [there for there in redis_state.locations if (there[1], *there[3:5]) != (queue, job, place)]
        assert len(kept) == len(redis_state.locations) - 1
        return replace(redis_state, locations=kept)

    return change


def within(queue: str, job: str, place: str, fence: int | None = None) -> Callable[[RedisState], RedisState]:
    def change(redis_state: RedisState) -> RedisState:
        epoch = redis_state.queues[0, queue].epoch
        return replace(redis_state, locations=[*redis_state.locations, (0, queue, epoch, job, place, fence)])

    return change


def all_of(*changes: Callable[[RedisState], RedisState]) -> Callable[[RedisState], RedisState]:
    def change(redis_state: RedisState) -> RedisState:
        for one in changes:
            redis_state = one(redis_state)
        return redis_state

    return change


def without_queue(name: str) -> Callable[[RedisState], RedisState]:
    return lambda redis_state: replace(
        redis_state, queues={key: queue_state for key, queue_state in redis_state.queues.items() if key[1] != name}
    )


def changed_meanwhile(redis_state: RedisState) -> RedisState:
    """Ids were read before the last entries were written: their jobs are not compared."""
    last = max(entry.time_us for entry in sample_history()[0] if "enqueued 0 l" in entry.text)
    queues: dict[tuple[int, str], QueueState] = {
        key: replace(queue_state, ids_read_from_us=last) for key, queue_state in redis_state.queues.items()
    }
    kept = [place for place in redis_state.locations if place[3] != "l"]
    return replace(redis_state, queues=queues, locations=kept)


IN_REDIS: list[tuple[str, str, Callable[[RedisState], RedisState]]] = [
    ("", "", lambda redis_state: redis_state),
    ("", "", changed_meanwhile),
    # Numbers.
    ("conservation", VIOLATION, with_queue("q", records=4)),
    ("conservation", VIOLATION, with_queue("q", active=2)),
    ("conservation", VIOLATION, with_queue("q", blocked=0)),
    ("conservation", VIOLATION, with_queue("q", dead=2)),
    ("conservation", VIOLATION, with_queue("q#fail", records=1)),
    # Ids.
    ("conservation", VIOLATION, without("q", "j", "record")),
    ("conservation", VIOLATION, all_of(without("q", "j", "record"), within("q", "n", "record"))),
    ("conservation", VIOLATION, without("q", "g", "dead")),
    ("conservation", VIOLATION, within("q", "d", "dead", 104)),
    ("conservation", VIOLATION, without("q#fail", "g:108", "record")),
    ("conservation", VIOLATION, within("q", "a", "record")),
    # Two states, or another than the journal's.
    ("states", VIOLATION, without("q", "i", "active")),
    ("states", VIOLATION, within("q", "j", "active", 107)),
    ("states", VIOLATION, within("q", "i", "scheduled")),
    ("states", VIOLATION, without("q", "l", "scheduled")),
    ("states", VIOLATION, without("q", "i", "blocked")),
    ("states", VIOLATION, within("q", "j", "blocked")),
    ("states", VIOLATION, all_of(without("q", "i", "active"), within("q", "i", "active", 106))),
    ("states", VIOLATION, within("q", "n", "scheduled")),
    ("states", VIOLATION, within("q", "n", "active", 107)),
    # Held jobs. While dependants have yet to be told, none counts as held too long.
    ("", "", with_queue("flow", resolving=1)),
    ("conservation", VIOLATION, with_queue("flow", held=1)),
    ("conservation", VIOLATION, with_queue("flow", records=3)),
    ("conservation", VIOLATION, all_of(without("flow", "ie", "record"), without("flow", "ie", "held"))),
    ("states", VIOLATION, without("flow", "ic", "held")),
    ("states", VIOLATION, within("flow", "id", "held")),
    ("states", VIOLATION, within("flow", "ic", "record")),
    ("states", VIOLATION, within("flow", "n", "held")),
    # The end of the journal.
    ("chain", VIOLATION, with_queue("q", hash="0" * 40)),
    ("chain", VIOLATION, with_queue("q", sequence=5)),
    ("chain", GAP, with_queue("q", sequence=500)),
    ("chain", GAP, with_queue("q", epoch=77)),
    ("chain", GAP, with_queue("q", journal_on=False)),
    ("chain", GAP, without_queue("q")),
]


Kinds = list[set[tuple[str, str]]]


@pytest.fixture(scope="module")
def found(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kinds, Kinds]:
    """(rule, kind) of the findings for each change of PLANTED and of IN_REDIS."""
    entries, redis_state = sample_history()
    planted = [rows_of(change(entries)) for _, change in PLANTED]
    # Redis is at the end of each journal, so that only its content can differ.
    each = [_at_the_end_of(rows, redis_state) for rows in planted] + [change(redis_state) for _, _, change in IN_REDIS]
    histories = planted + [rows_of(entries)] * len(IN_REDIS)
    frame = frame_of(spark, tmp_path_factory.mktemp("planted"), histories)
    kinds: Kinds = [set() for _ in histories]
    for finding in Auditor(frame, merged_redis_states(each), limit=100_000).run().findings:
        kinds[finding.history].add((finding.rule, finding.kind))
    return kinds[: len(planted)], kinds[len(planted) :]


@pytest.mark.timeout(300)
def test_impossible_events_are_found_by_their_rule(found: tuple[Kinds, Kinds]) -> None:
    planted, _ = found
    missed = [
        f"{number}: {rule} did not find it, {kinds or 'nothing'} did"
        for number, ((rule, _), kinds) in enumerate(zip(PLANTED, planted, strict=True))
        if (rule, VIOLATION) not in kinds
    ]
    assert missed == [], "\n".join(missed)
    # Chain and rows are right.
    elsewhere = [kinds for (rule, _), kinds in zip(PLANTED, planted, strict=True) if rule not in ("chain", "overlap")]
    assert not any(rule == "chain" for kinds in elsewhere for rule, _ in kinds)
    assert not any(rule == "rows" for kinds in planted for rule, _ in kinds)


@pytest.mark.timeout(300)
def test_the_state_of_redis_is_compared_with_the_journal(found: tuple[Kinds, Kinds]) -> None:
    """The first two cases are clean: the unchanged state, and a queue that works while it is read."""
    _, in_redis = found
    missed = [
        f"{number}: {(rule, kind)} in {kinds}"
        for number, ((rule, kind, _), kinds) in enumerate(zip(IN_REDIS, in_redis, strict=True))
        if (rule and (rule, kind) not in kinds) or bool(rule) != bool(kinds)
    ]
    assert missed == [], "\n".join(missed)
