"""Reading the journal: what an entry says, and what is no entry."""

import pytest

from forq.broker.journal import SCHEMA, VERBS, Event, entry_hash, read_entry
from forq.errors import InvalidData
from tests.support.journal_replay import ImpossibleEvent, Replay
from tests.support.one_queue import OneQueue

FIELDS = {b"v": b"2", b"q": b"17", b"s": b"3", b"t": b"1790000000000001", b"a": b"w1", b"h": b"0" * 40}


def read(text: str, **changed: str | None) -> list[Event]:
    fields = FIELDS | {b"e": text.encode()} | {name.encode(): (value or "").encode() for name, value in changed.items()}
    for name in [name.encode() for name, value in changed.items() if value is None]:
        del fields[name]
    return list(read_entry(fields, "q"))


def test_every_column_is_read() -> None:
    text = "done 5 a 7 b -\nstalled 6 c signal_9\nclaimed 7 2 d\nscheduled 0 e 1790000000123\ndead 8 f 9 1\npaused 0"
    common = ("q", 17, 3)
    assert read(text) == [
        (*common, 0, 1790000000000001, "done", "a", 5, None, "w1", 7, None, None, text, "0" * 40),
        (*common, 1, 1790000000000001, "done", "b", 5, None, "w1", None, None, None, None, None),
        (*common, 2, 1790000000000001, "stalled", "c", 6, None, "w1", None, "signal_9", None, None, None),
        (*common, 3, 1790000000000001, "claimed", "d", 7, 2, "w1", None, None, None, None, None),
        (*common, 4, 1790000000000001, "scheduled", "e", 0, None, "w1", None, None, 1790000000123000, None, None),
        (*common, 5, 1790000000000001, "dead", "f", 8, None, "w1", 9, "fail_job", None, None, None),
        (*common, 6, 1790000000000001, "paused", None, 0, None, "w1", None, None, None, None, None),
    ]


@pytest.mark.parametrize(
    ("line", "micros", "cause"),
    [
        ("timed_out 5 a timeout 12", 12, "timeout"),
        ("interrupted 5 a late", None, "late"),
        ("suspected 5 a signal_9 -", None, "signal_9"),
        ("dead 5 a - 0", None, None),
        ("deleted 0 12", None, "12"),
        ("created 0 17", None, "17"),
    ],
)
def test_a_detail_is_read_as_what_it_is(line: str, micros: int | None, cause: str | None) -> None:
    [event] = read(line)
    assert (event.micros, event.cause) == (micros, cause)


@pytest.mark.parametrize(
    "line",
    [
        *("", "done", "done 5", "done 5 ", "done 5 a", "done 5 a 7 b", "done 5 a 7 ", "done 5  a 7", "done 5 a x"),
        *(
            "done -5 a 7",
            "done x a 7",
            "done 5 a 1_0",
            "done 5 a \u0663",
            "done 5 \xe4 7",
            "done 5 a 1234567890123456789",
        ),
        *("born 0 a", "enqueued 5 a", "enqueued 0 a\n", "\nenqueued 0 a", "enqueued 0 a\tb\x7f", "updated 0 a b"),
        *("claimed 5 a", "claimed 5 1", "claimed 5 -1 a", "dead 5 a 7", "dead 5 a 7 2", "scheduled 0 a", "paused 0 a"),
        *("stalled 5 a", "stalled 5 a b c", "retried 5 a 7 b 8", "deleted 0", "created 0 x", "revived 5 a b", "paused"),
    ],
)
def test_a_line_that_is_not_in_the_schema_is_refused(line: str) -> None:
    with pytest.raises(InvalidData):
        read(line)
    with pytest.raises(InvalidData):
        read(f"enqueued 0 a\n{line}")


@pytest.mark.parametrize(
    "change", [{"v": "1"}, {"v": "3"}, {"s": "x"}, {"s": "-1"}, {"t": "1.5"}, {"q": ""}, {"h": "0"}]
)
def test_an_entry_that_is_not_in_the_schema_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(InvalidData):
        read("enqueued 0 a", **change)


@pytest.mark.parametrize("name", ["v", "q", "s", "t", "a", "e", "h"])
def test_an_entry_without_one_of_its_fields_is_refused(name: str) -> None:
    with pytest.raises(InvalidData):
        read("enqueued 0 a", **{name: None})


def test_what_an_earlier_release_wrote_is_refused_by_its_version() -> None:
    with pytest.raises(InvalidData, match="schema"):
        read("enqueued 0 a", v=str(SCHEMA - 1))


def test_the_replay_knows_every_verb() -> None:
    assert all(hasattr(Replay, f"_{verb}") for verb in VERBS)


def test_the_hash_covers_everything_that_an_entry_says() -> None:
    hashes = {
        entry_hash("", 17, 3, 1790000000000001, "w1", "enqueued 0 a"),
        entry_hash("x", 17, 3, 1790000000000001, "w1", "enqueued 0 a"),
        entry_hash("", 18, 3, 1790000000000001, "w1", "enqueued 0 a"),
        entry_hash("", 17, 4, 1790000000000001, "w1", "enqueued 0 a"),
        entry_hash("", 17, 3, 1790000000000002, "w1", "enqueued 0 a"),
        entry_hash("", 17, 3, 1790000000000001, "w2", "enqueued 0 a"),
        entry_hash("", 17, 3, 1790000000000001, "w1", "enqueued 0 b"),
    }
    assert len(hashes) == 7


@pytest.mark.parametrize("field", [b"t", b"a", b"e", b"h", b"s"])
def test_an_entry_that_was_changed_breaks_the_chain(queue: OneQueue, field: bytes) -> None:
    queue.enqueue("a")
    queue.enqueue("b")
    entries = queue.entries()
    changed = {b"t": b"1", b"a": b"me", b"e": b"enqueued 0 z", b"h": b"0" * 40, b"s": b"9"}
    for at in range(3):
        replay = Replay()
        tampered = [*entries[:at], entries[at] | {field: changed[field]}, *entries[at + 1 :]]
        with pytest.raises(ImpossibleEvent):
            replay.read_all(tampered)


def test_an_entry_that_was_taken_out_breaks_the_chain(queue: OneQueue) -> None:
    for job_id in "abc":
        queue.enqueue(job_id)
    entries = queue.entries()
    replay = Replay()
    replay.read(entries[0])
    with pytest.raises(ImpossibleEvent):
        replay.read(entries[2])
