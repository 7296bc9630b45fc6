"""Parsing journal entries, and refusing invalid ones."""

from typing import Any

import pytest

from forq.broker.journal import VERBS, Entry, Event, entry_hash, pack_entry, read_entry, unpack_entry
from forq.errors import InvalidData
from tests.support.drive.one_queue import OneQueue
from tests.support.models.journal_replay import ImpossibleEvent, Replay

ENTRY = Entry(17, 3, 1790000000000001, "w1", "0" * 40, "")


def read(text: str) -> list[Event]:
    return list(read_entry(pack_entry(ENTRY._replace(text=text)), "q"))


def test_every_column_is_read() -> None:
    lines = ["done 5 a 7 b -", "stalled 6 c signal_9", "claimed 7 2 d", "scheduled 0 e 1790000000123"]
    text = "\n".join([*lines, "dead 8 f 9 1 KeyError", "retried 9 g - OSError", "dead 9 h - 0 -", "paused 0"])
    common = ("q", 17, 3)
    now = 1790000000000001
    assert read(text) == [
        (*common, 0, now, "done", "a", 5, None, "w1", 7, None, None, None, text, "0" * 40),
        (*common, 1, now, "done", "b", 5, None, "w1", None, None, None, None, None, None),
        (*common, 2, now, "stalled", "c", 6, None, "w1", None, "signal_9", None, None, None, None),
        (*common, 3, now, "claimed", "d", 7, 2, "w1", None, None, None, None, None, None),
        (*common, 4, now, "scheduled", "e", 0, None, "w1", None, None, None, 1790000000123000, None, None),
        (*common, 5, now, "dead", "f", 8, None, "w1", 9, "KeyError", True, None, None, None),
        (*common, 6, now, "retried", "g", 9, None, "w1", None, "OSError", None, None, None, None),
        (*common, 7, now, "dead", "h", 9, None, "w1", None, "-", False, None, None, None),
        (*common, 8, now, "paused", None, 0, None, "w1", None, None, None, None, None, None),
    ]


@pytest.mark.parametrize(
    ("line", "micros", "cause"),
    [
        ("timed_out 5 a timeout 12", 12, "timeout"),
        ("interrupted 5 a late", None, "late"),
        ("suspected 5 a signal_9 -", None, "signal_9"),
        ("dead 5 a - 0 KeyError", None, "KeyError"),
        ("retried 5 a 9 -", 9, "-"),
        ("released 5 a 9", 9, None),
        ("held 0 a done b", None, "done b"),
        ("held 0 a dead b c", None, "dead b c"),
        ("unmet 0 a b cancelled", None, "b cancelled"),
        ("released 5 a -", None, None),
        ("dead 5 a 9 1 " + 64 * "E", 9, 64 * "E"),
        ("deleted 0 12", None, "12"),
        ("created 0 17", None, "17"),
    ],
)
def test_a_detail_is_parsed_by_its_verb(line: str, micros: int | None, cause: str | None) -> None:
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
        *(
            "claimed 5 a",
            "claimed 5 1",
            "claimed 5 -1 a",
            "dead 5 a 7 E",
            "dead 5 a 7 2 E",
            "scheduled 0 a",
            "paused 0 a",
        ),
        *(
            "stalled 5 a",
            "stalled 5 a b c",
            "retried 5 a 7 E b 8 E",
            "deleted 0",
            "created 0 x",
            "revived 5 a b",
            "paused",
        ),
        *("retried 5 a 7", "retried 5 a 7 ", "retried 5 a 7 E E", "retried 5 a 7 " + 65 * "E", "retried 5 a 7 \xe4"),
        *("held 0 a", "held 0 a done", "held 0 a b", "held 5 a done b", "met 0 a b", "unmet 0 a", "unmet 0 a b"),
        *("released 5 a", "released 5 a 7 b 8", "released 5 a 7 E", "released 5 a x", "released a 7"),
        *("dead 5 a 7 0", "dead 5 a 7 0 ", "dead 5 a 7 1 E E", "dead 5 a 7 1 " + 65 * "E", "dead 5 a 7 1 \x7f"),
    ],
)
def test_a_line_that_is_not_in_the_schema_is_refused(line: str) -> None:
    with pytest.raises(InvalidData):
        read(line)
    with pytest.raises(InvalidData):
        read(f"enqueued 0 a\n{line}")


HEAD = ("17", "3", "1790000000000001", "w1", "0" * 40)


@pytest.mark.parametrize(
    ("at", "value"), [(0, ""), (0, "9" * 19), (1, "x"), (1, "-1"), (2, "1.5"), (3, "w 1"), (4, "0"), (4, "ü" * 40)]
)
def test_an_entry_with_an_invalid_value_is_refused(at: int, value: str) -> None:
    head = " ".join([*HEAD[:at], value, *HEAD[at + 1 :]])
    with pytest.raises(InvalidData, match="cannot be read"):
        read_entry({b"v4": f"{head}\nenqueued 0 a".encode()})


@pytest.mark.parametrize("at", range(len(HEAD)))
def test_an_entry_without_one_of_its_values_is_refused(at: int) -> None:
    head = " ".join([*HEAD[:at], *HEAD[at + 1 :]])
    with pytest.raises(InvalidData, match="cannot be read"):
        read_entry({b"v4": f"{head}\nenqueued 0 a".encode()})


@pytest.mark.parametrize("fields", [{}, {b"v": b"3", b"e": b"enqueued 0 a"}, {b"v5": b"enqueued 0 a"}])
def test_an_entry_of_another_schema_is_refused(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(InvalidData, match="another schema"):
        read_entry(fields)


def test_a_packed_entry_is_unpacked_as_it_was() -> None:
    entry = ENTRY._replace(text="enqueued 0 a\nscheduled 0 a 5")
    assert unpack_entry(pack_entry(entry)) == entry


def test_the_replay_knows_every_verb() -> None:
    assert all(hasattr(Replay, f"_{verb}") for verb in VERBS)


def test_the_hash_covers_every_field_of_an_entry() -> None:
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


@pytest.mark.parametrize(
    "change", [{"time_us": 1}, {"actor": "me"}, {"text": "enqueued 0 z"}, {"hash": "0" * 40}, {"sequence": 9}]
)
def test_a_changed_entry_breaks_the_chain(queue: OneQueue, change: dict[str, Any]) -> None:
    queue.enqueue("a")
    queue.enqueue("b")
    entries = queue.entries()
    for at in range(3):
        replay = Replay()
        tampered = [*entries[:at], pack_entry(unpack_entry(entries[at])._replace(**change)), *entries[at + 1 :]]
        with pytest.raises(ImpossibleEvent):
            replay.read_all(tampered)


def test_a_missing_entry_breaks_the_chain(queue: OneQueue) -> None:
    for job_id in "abc":
        queue.enqueue(job_id)
    entries = queue.entries()
    replay = Replay()
    replay.read(entries[0])
    with pytest.raises(ImpossibleEvent):
        replay.read(entries[2])
