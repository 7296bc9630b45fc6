"""Histories for tests of the pipeline, written by hand or read from a server.

A written history is a list of entries. `rows_of` numbers and chains them, so a change of an entry leaves the chain of
hashes intact; a change of the rows breaks it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import redis
from pyspark.sql import DataFrame, SparkSession

from forq.broker.journal import Entry, Event, entry_hash, pack_entry, read_entry
from forq.broker.keys import DEFAULT_PREFIX, queue_base
from forq.pipeline.audit.redis_state import JobLocation, QueueState, RedisState
from forq.pipeline.format import EVENTS_ARROW

STEP_US = 1000
LATER_US = 1_000_000_000_000


@dataclass(frozen=True)
class WrittenEntry:
    queue: str
    epoch: int
    time_us: int
    text: str
    actor: str = "w1"

    def with_text(self, old: str, new: str) -> "WrittenEntry":
        assert old in self.text, f"{old!r} is not in {self.text!r}"
        return replace(self, text=self.text.replace(old, new))


class JournalWriter:
    """Writes the entries of several queues, with one clock."""

    def __init__(self) -> None:
        self.entries: list[WrittenEntry] = []
        self.now_us = 1_000_000
        self._epochs: dict[str, int] = {}

    def create(self, queue: str) -> None:
        self._epochs[queue] = self.now_us
        self.write(queue, f"created 0 {self.now_us}", actor="-")

    def write(self, queue: str, *lines: str, actor: str = "w1") -> None:
        self.entries.append(WrittenEntry(queue, self._epochs[queue], self.now_us, "\n".join(lines), actor))
        self.now_us += STEP_US


def rows_of(entries: Iterable[WrittenEntry]) -> list[Event]:
    """The rows of these entries, numbered and chained."""
    last: dict[tuple[str, int], tuple[int, str]] = {}
    rows: list[Event] = []
    for entry in entries:
        sequence, previous = last.get((entry.queue, entry.epoch), (0, ""))
        sequence += 1
        hashed = entry_hash(previous, entry.epoch, sequence, entry.time_us, entry.actor, entry.text)
        last[entry.queue, entry.epoch] = sequence, hashed
        fields = pack_entry(Entry(entry.epoch, sequence, entry.time_us, entry.actor, hashed, entry.text))
        rows += read_entry(fields, entry.queue)
    return rows


def rows_on_server(url: str, *queues: str) -> list[Event]:
    """All events in the journals of these queues."""
    client: Any = redis.Redis.from_url(url)
    with client:
        return [
            event
            for queue in queues
            for _, fields in client.xrange(f"{queue_base(DEFAULT_PREFIX, queue)}:events")
            for event in read_entry(fields, queue)
        ]


def frame_of(spark: SparkSession, folder: Path, histories: Sequence[Sequence[Event]]) -> DataFrame:
    """The rows of several histories in one DataFrame, with their number in the column `history`.

    Goes through a file: rows inside a query plan are copied by each planning step.
    """
    numbers = [number for number, rows in enumerate(histories) for _ in rows]
    columns = list(zip(*(row for rows in histories for row in rows), strict=True)) or [()] * len(EVENTS_ARROW)
    # Without the schema's `not null`: values may be missing here.
    fields = [pa.field("history", pa.int32()), *(pa.field(field.name, field.type) for field in EVENTS_ARROW)]
    arrays = [pa.array(values, field.type) for values, field in zip([numbers, *columns], fields, strict=True)]
    pq.write_table(pa.table(arrays, schema=pa.schema(fields)), folder / "rows.parquet", row_group_size=20_000)
    return spark.read.parquet(str(folder / "rows.parquet"))


def redis_state_at_end(
    rows: Iterable[Event],
    held: dict[str, tuple[int, int, int, int, int]],
    locations: list[tuple[str, str, str, int | None]],
) -> RedisState:
    """The state of Redis after the last of these rows. `held`: records, held, active, blocked, dead of each queue;
    `locations`: (queue, job, location, fence)."""
    heads = {(row.queue): row for row in rows if row.hash is not None}
    queues = {
        (0, queue): QueueState(
            0,
            queue,
            heads[queue].epoch,
            heads[queue].sequence,
            heads[queue].hash or "",
            *counts,
            0,
            True,
            LATER_US,
            LATER_US,
        )
        for queue, counts in held.items()
    }
    return RedisState(LATER_US, queues, [(0, queue, heads[queue].epoch, *place) for queue, *place in _lists(locations)])


def _lists(locations: list[tuple[str, str, str, int | None]]) -> list[list[Any]]:
    return [list(place) for place in locations]


def _numbered(number: int, redis_state: RedisState) -> tuple[dict[tuple[int, str], QueueState], list[JobLocation]]:
    """The same state for the history with this number."""
    queues = {
        (number, queue): replace(queue_state, history=number) for (_, queue), queue_state in redis_state.queues.items()
    }
    return queues, [(number, *place[1:]) for place in redis_state.locations]


def merged_redis_states(each: Sequence[RedisState]) -> RedisState:
    """The states of several histories, by their numbers."""
    queues: dict[tuple[int, str], QueueState] = {}
    locations: list[JobLocation] = []
    for number, redis_state in enumerate(each):
        of_one, there = _numbered(number, redis_state)
        queues |= of_one
        locations += there
    return RedisState(LATER_US, queues, locations)


def sample_history() -> tuple[list[WrittenEntry], RedisState]:
    """Queues with every kind of event, and the state of Redis at the end."""
    journal = JournalWriter()
    write = journal.write
    _write_deleted_queue(journal)
    _write_release_queue(journal)
    _write_own_options(journal)
    _write_held_jobs(journal)
    journal.create("q#fail")
    journal.create("q")
    write("q", "enqueued 0 a b c d e", actor="-")
    write("q", "enqueued 0 s", "scheduled 0 s 5000", actor="-")
    write("q", "claimed 101 1 a b c d")
    write("q", "done 101 a 10 b -", "returned 0 c d")
    write("q", "claimed 102 1 c d")
    write("q", "blocked 0 c", actor="-")
    write("q", "blocked 0 c", actor="-")
    write("q", "retried 102 d 30 ValueError", "scheduled 0 d 9000", "done 102 c 20", "unblocked 0 c")
    write("q", "updated 0 e", actor="-")
    write("q", "updated 0 s", "scheduled 0 s 7000", actor="-")
    write("q", "promoted 0 s d", actor="p1")
    write("q", "claimed 103 1 e s", "claimed 103 2 d", actor="w2")
    write("q", "blocked 0 e", actor="-")
    write("q", "stalled 103 e signal_9 100", "merged 0 e", "returned 0 e s d", actor="p1")
    write("q", "claimed 104 1 s", "claimed 104 2 e d", actor="w2")
    write("q", "blocked 0 s", actor="-")
    write("q", "withdrawn 0 s", "marked 104 s", actor="-")
    write("q", "cancelled 104 s", "dead 104 d 40 1 KeyError", "failing 104 d", actor="w2")
    write("q#fail", "claimed 201 1 d:104", actor="w9")
    write("q", "timed_out 104 e timeout 50", "returned 0 e", actor="w2")
    write("q", "claimed 105 3 e", actor="w2")
    write("q", "dead 105 e - 1 KeyError", "failing 105 e", actor="w2")
    write("q#fail", "done 201 d:104 7", "claimed 202 1 e:105", actor="w9")
    write("q", "revived 104 d", actor="-")
    write("q", "cancelled 0 d c", actor="-")
    write("q#fail", "retried 202 e:105 8 ValueError", "scheduled 0 e:105 9000", actor="w9")
    write("q", "enqueued 0 d", actor="-")
    write("q", "claimed 106 1 d")
    write("q", "dead 106 d 5 1 KeyError", "failing 106 d", "forgotten 105 e")
    write("q", "discarded 106 d", actor="-")
    write("q#fail", "promoted 0 e:105", "claimed 203 2 e:105", actor="w9")
    write("q#fail", "dead 203 e:105 9 0 KeyError", "claimed 204 1 d:106", actor="w9")
    write("q", "enqueued 0 g h i j k", actor="-")
    write("q", "paused 0", actor="-")
    write("q", "resumed 0", actor="-")
    write("q", "claimed 107 1 g h i")
    write("q", "suspected 107 g signal_9", "interrupted 107 h stop 5", "returned 0 g h", actor="p1")
    write("q", "claimed 108 1 g")
    write("q", "dead 108 g 9 1 KeyError", "failing 108 g")
    write("q", "blocked 0 i", actor="-")
    write("q", "enqueued 0 l", "scheduled 0 l 99999999", actor="-")
    write("q", "dropped 0 z", actor="w2")
    return journal.entries, _held(journal.entries)


def _write_deleted_queue(journal: JournalWriter) -> None:
    """A queue deleted with 4 jobs (one active, one blocked, one waiting, one dead), then created and deleted again."""
    write = journal.write
    journal.create("old")
    write("old", "enqueued 0 x y z v", actor="-")
    write("old", "claimed 11 1 x y v")
    write("old", "done 11 x 10", "dead 11 v 10 0 KeyError")
    write("old", "blocked 0 y", actor="-")
    write("old", "deleted 0 4", actor="-")
    journal.create("old")
    write("old", "enqueued 0 x y", actor="-")
    write("old", "claimed 21 1 x y")
    write("old", "done 21 x 10 y 10")
    write("old", "deleted 0 0", actor="-")


def _write_release_queue(journal: JournalWriter) -> None:
    """A queue in a release mode. The job without an awaiter is claimed and settled in one step, twice."""
    write = journal.write
    journal.create("r")
    write("r", "enqueued 0 m n o", actor="-")
    write("r", "claimed 301 1 m")
    write("r", "blocked 0 m", actor="-")
    write("r", "released 301 m 12", "unblocked 0 m")
    write("r", "claimed 302 1 m n")
    write("r", "marked 302 n", actor="-")
    write("r", "released 302 m -", "released 302 n 3")
    write("r", "claimed 303 1 o", "retried 303 o - NotAwaited", "scheduled 0 o 1000", actor="p1")
    write("r", "promoted 0 o", "claimed 304 2 o", "dead 304 o - 0 NotAwaited", actor="p1")


def _write_own_options(journal: JournalWriter) -> None:
    """Jobs with options of their own. w7 serves the main lane, w8 the retry lane. The clock is between 1 s and 2 s."""

    def write(*lines: str, actor: str = "-") -> None:
        journal.write("own", *lines, actor=actor)

    journal.create("own")
    write("enqueued 0 oa ob oe", "options 0 oa r=1,b=1:5", "options 0 oe x=999000")
    write("claimed 401 1 oa ob oe", actor="w7")
    write("retried 401 oa 5 KeyError", "scheduled 0 oa 9", "done 401 ob 5", "returned 0 oe", actor="w7")
    write("promoted 0 oa", "claimed 402 2 oa", "claimed 402 1 oe", actor="w7")
    # Its own retries are used up: the next one is in the retry lane.
    write("retried 402 oa 5 KeyError", "done 402 oe 5", actor="w7")
    write("claimed 403 3 oa", actor="w8")
    # The retry was allowed by the options before the update, which resets the counts.
    write("blocked 0 oa")
    write("options 0 oa r=0", "merged 0 oa", "retried 403 oa 5 KeyError", actor="w8")
    write("claimed 404 1 oa", actor="w7")
    write("retried 404 oa 5 KeyError", actor="w7")
    write("claimed 405 2 oa", actor="w8")
    write("done 405 oa 5", actor="w8")
    # Neither snoozes nor lost attempts are retries.
    write("enqueued 0 oh", "options 0 oh r=0")
    write("claimed 406 1 oh", actor="w7")
    write("snoozed 406 oh 5", "claimed 407 1 oh", actor="w7")
    write("stalled 407 oh signal_9", "returned 0 oh", actor="p1")
    write("claimed 408 2 oh", actor="w7")
    write("timed_out 408 oh timeout", "returned 0 oh", actor="w7")
    write("claimed 409 3 oh", actor="w7")
    write("done 409 oh 5", actor="w7")
    # An expired job is dead, and without its expiry when it is revived.
    write("enqueued 0 of", "scheduled 0 of 8", "options 0 of r=3,x=700")
    write("promoted 0 of", "claimed 410 1 of", "dead 410 of - 0 Expired", actor="w7")
    write("revived 410 of", "options 0 of r=3")
    write("claimed 411 1 of", actor="w7")
    write("done 411 of 5", actor="w7")
    # A new job of the same id, and an update, have other options.
    write("enqueued 0 of")
    write("claimed 412 1 of", actor="w7")
    write("done 412 of 5", actor="w7")
    write("enqueued 0 og", "options 0 og x=800")
    write("options 0 og -", "updated 0 og")
    write("claimed 413 1 og", actor="w7")
    write("done 413 og 5", actor="w7")


def _write_held_jobs(journal: JournalWriter) -> None:
    """Jobs that wait for others, with each `when`, and each way in which that ends."""

    def write(*lines: str, actor: str = "-") -> None:
        journal.write("flow", *lines, actor=actor)

    journal.create("flow")
    write("enqueued 0 fa fb fc fd", "held 0 fb done fa", "held 0 fc done fa fb", "held 0 fd dead fa fc")
    write("claimed 501 1 fa", actor="w1")
    write("options 0 fc r=3", "updated 0 fc", "held 0 fc done fa fb")
    write("done 501 fa 5", "met 0 fb", "claimed 502 1 fb", actor="w1")
    write("done 502 fb 5", "met 0 fc", "scheduled 0 fc 1000", "options 0 fc r=3,x=9000", actor="w1")
    write("promoted 0 fc", "claimed 503 1 fc", actor="w1")
    write("done 503 fc 5", "cancelled 0 fd", actor="w1")
    # A death dooms those behind it, and lets the others go. What has ended before counts at once.
    write(
        "enqueued 0 ga gb gc gd ge",
        "held 0 gb done ga",
        "held 0 gc ended gb fa",
        "held 0 gd dead gb",
        "held 0 ge done gd",
    )
    write("claimed 504 1 ga", actor="w1")
    write(
        *("dead 504 ga 5 0 KeyError", "unmet 0 gb ga dead", "claimed 505 1 gb", "dead 505 gb - 0 DependencyFailed"),
        *("met 0 gc", "met 0 gd", "claimed 505 1 gc gd"),
        actor="w1",
    )
    write("enqueued 0 gf", "held 0 gf done fa", "met 0 gf")
    write("done 505 gd 5", "met 0 ge", "cancelled 505 gc", actor="w1")
    write("cancelled 0 ge gf")
    # The ids are used again. A hold means the job of its time, or the enqueue that is blocked behind it.
    write("enqueued 0 ha hb hc", "held 0 hb done ha")
    write("claimed 506 1 ha hc", actor="w1")
    write("blocked 0 ha", "blocked 0 hc")
    write("enqueued 0 hd he hf", "held 0 hd done ha", "held 0 he done hc", "held 0 hf ended hc")
    write(
        "withdrawn 0 hc", "unmet 0 he hc cancelled", "claimed 507 1 he", "dead 507 he - 0 DependencyFailed", "met 0 hf"
    )
    write("done 506 ha 5", "unblocked 0 ha", "met 0 hb", "claimed 508 1 ha hb hf", actor="w1")
    write("stalled 508 ha signal_9", "returned 0 ha hb hf", actor="p1")
    write("claimed 509 2 ha", actor="w1")
    write("done 509 ha 5", "met 0 hd", actor="w1")
    write("cancelled 0 hb hd hf", "forgotten 507 he")
    # A batch with one member and two callbacks, and one that fails.
    write("batch_opened 0 B1")
    write("enqueued 0 B1:on_done B1:on_end", "held 0 B1:on_done done+", "held 0 B1:on_end ended+")
    write("enqueued 0 ja")
    write("claimed 511 1 ja", actor="w1")
    write("done 511 ja 5", "batch_ended 0 B1 done 1", "met 0 B1:on_done", "met 0 B1:on_end", actor="w1")
    write("claimed 512 1 B1:on_done B1:on_end", actor="w1")
    write("done 512 B1:on_done 5 B1:on_end 5", actor="w1")
    write("batch_opened 0 B2")
    write("enqueued 0 jb B2:on_done", "held 0 B2:on_done done+")
    write("cancelled 0 jb", "batch_ended 0 B2 failed 1", "cancelled 0 B2:on_done")
    # A cancelled dependency, one that waits itself, and jobs that stay held.
    write("enqueued 0 ia ib ic id ie", "held 0 ib done ia", "held 0 ic done id", "held 0 ie ended ic id")
    write(
        "cancelled 0 ia", "unmet 0 ib ia cancelled", "claimed 520 1 ib", "dead 520 ib - 0 DependencyFailed", actor="w1"
    )


def _held(entries: list[WrittenEntry]) -> RedisState:
    locations: list[tuple[str, str, str, int | None]] = [
        *(("q", job, "record", None) for job in "hjkli"),
        ("q", "l", "scheduled", None),
        ("q", "i", "active", 107),
        ("q", "i", "blocked", None),
        ("q", "g", "dead", 108),
        ("q#fail", "g:108", "record", None),
        ("q#fail", "d:106", "record", None),
        ("q#fail", "d:106", "active", 204),
        ("q#fail", "e:105", "dead", 203),
        ("r", "o", "dead", 304),
        ("flow", "hc", "record", None),
        ("flow", "hc", "active", 506),
        ("flow", "id", "record", None),
        *(("flow", job, location, None) for job in ("ic", "ie") for location in ("record", "held")),
        *(("flow", job, "dead", fence) for job, fence in (("ga", 504), ("gb", 505), ("ib", 520))),
    ]
    held = {
        "q": (5, 0, 1, 1, 1),
        "q#fail": (2, 0, 1, 0, 1),
        "r": (0, 0, 0, 0, 1),
        "own": (0, 0, 0, 0, 0),
        "flow": (4, 2, 1, 0, 3),
    }
    return redis_state_at_end(rows_of(entries), held, locations)
