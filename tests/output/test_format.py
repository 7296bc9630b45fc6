"""Parses bytes from a FIFO into records."""

import json
import random
from typing import Any

import pytest

from forq.output.format import Line, OutputParser, pack_line, pack_notice


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def line(text: str, job: str | None = "j", **more: Any) -> bytes:
    return b"".join(pack_line(Line("stdout", "INFO", 1_700_000_000_123, 7, 8, job, None, False, text)._replace(**more)))


def lines(clock: Clock | None = None) -> OutputParser:
    return OutputParser("q", now=clock or Clock(), clock=lambda: 1_700_000_001.5)


def brief(records: list[dict[str, Any]]) -> list[tuple[str, str | None, str]]:
    return [(record["stream"], record.get("job"), record["message"]) for record in records]


def test_a_record_has_all_fields() -> None:
    logged = line("m\nn", stream="log", level="ERROR", logger="my.lib")
    assert lines().feed(logged + b"raw\r\n", None) == [
        {
            "time": "2023-11-14T22:13:20.123Z",
            "level": "ERROR",
            "queue": "q",
            "job": "j",
            "stream": "log",
            "pid": 7,
            "logger": "my.lib",
            "message": "m\nn",
        },
        {"time": "2023-11-14T22:13:21.500Z", "level": "INFO", "queue": "q", "stream": "raw", "message": "raw"},
    ]


MIXED = (
    line("one\ntwo")
    + "raw ü\nhalf".encode()
    + line("tagged " + "t" * 5000)
    + b"\n\x1ejunk\n\x1e[1]\n\x1e{}\n\xff\xfe\n"
)


def test_tagged_and_raw_lines_may_be_mixed() -> None:
    assert brief(lines().feed(MIXED, "r")) == [
        ("stdout", "j", "one"),
        ("stdout", "j", "two"),
        ("raw", "r", "raw ü"),
        ("raw", "r", "half"),
        ("stdout", "j", "tagged " + "t" * 5000),
        ("raw", "r", ""),
        ("raw", "r", "\x1ejunk"),
        ("raw", "r", "\x1e[1]"),
        ("raw", "r", "\x1e{}"),
        ("raw", "r", "\\xff\\xfe"),
    ]


def test_records_do_not_depend_on_how_the_bytes_were_split() -> None:
    whole = brief(lines().feed(MIXED, "r"))
    for seed in range(300):
        chance = random.Random(seed)
        cuts = sorted(chance.sample(range(len(MIXED)), chance.choice([1, 2, 5, 50])))
        reader, found = lines(), []
        for begin, end in zip([0, *cuts], [*cuts, len(MIXED)], strict=True):
            found += reader.feed(MIXED[begin:end], "r")
        assert brief(found) == whole, seed


def test_invalid_bytes_become_text_without_an_error() -> None:
    reader = lines()
    chance = random.Random(1)
    for _ in range(300):
        junk = bytes(chance.choice(b'\x1e\x1f[]{}",:\n\r\x00\xffax1') for _ in range(200))
        for record in [*reader.feed(junk, None), *reader.feed_flood(junk)[2]]:
            assert isinstance(record["message"], str)


def test_a_long_line_is_truncated_without_buffering_it() -> None:
    reader = lines()
    for _ in range(100):
        assert reader.feed(b"x" * 100_000, None) == []
    (record, after) = reader.feed(b"\nafter\n", None)
    assert record["message"] == "x" * 8192 + "…"
    assert after["message"] == "after"


def test_continued_lines_are_joined_by_thread_and_job() -> None:
    reader = lines()
    parts = line("a", more=True) + line("b", more=True, thread=9) + line("c", job="k") + line("A") + line("B", thread=9)
    assert brief(reader.feed(parts, None)) == [("stdout", "k", "c"), ("stdout", "j", "aA"), ("stdout", "j", "bB")]
    assert not reader.waiting


def test_an_unfinished_line_becomes_a_record_after_a_while() -> None:
    clock = Clock()
    reader = lines(clock)
    assert reader.feed(line("dots", more=True) + b"prompt: ", "r") == []
    assert reader.overdue() == []
    clock.now += 1.1
    assert brief(reader.overdue()) == [("stdout", "j", "dots"), ("raw", None, "prompt: ")]
    assert not reader.waiting


def test_the_end_mark_of_a_job_assigns_it_the_raw_lines_before() -> None:
    ends = [pack_notice({"end": job}) for job in "ab"]
    chunk = b"of a\n" + line("tagged", job="t") + ends[0] + b"of b\n" + ends[1] + b"of c\n"
    assert brief(lines().feed(chunk, "now")) == [
        ("raw", "a", "of a"),
        ("stdout", "t", "tagged"),
        ("raw", "b", "of b"),
        ("raw", "now", "of c"),
    ]


def test_during_a_flood_only_urgent_lines_are_kept() -> None:
    error = line("failed", stream="log", level="ERROR")
    reader = lines()
    assert reader.feed(b"be", None) == []
    count, size, urgent = reader.feed_flood(b"gun\n" + error + line("chatter") + line("info", stream="log") + b"x" * 50)
    assert (count, brief(urgent)) == (4, [("log", "j", "failed")])
    assert size > 50
    assert brief(reader.feed(b"\nnext\n", None)) == [("raw", None, "x" * 50), ("raw", None, "next")]


def test_a_redrawn_progress_bar_is_sampled() -> None:
    clock = Clock()
    reader, shown = lines(clock), []
    for step in range(80):
        clock.now += 0.125
        shown += [*reader.feed(line(f"\r{step}%", more=True), None), *reader.overdue()]
    shown += reader.feed(line("\rdone"), None)
    assert [record["message"].strip() for record in shown[:-1]] == ["40%"]
    assert shown[-1]["message"].endswith("\rdone")


@pytest.mark.parametrize(
    "forged",
    [
        {"job": ["x"]},
        {"job": {}},
        {"millis": 10**30},
        {"millis": -1},
        {"millis": "now"},
        {"level": "x\ny"},
        {"level": ""},
        {"stream": "raw"},
        {"logger": 1},
        {"pid": None},
        {"thread": []},
        {"text": None},
        {"job": "j" * 1000},
        {"logger": "l" * 1000},
    ],
)
def test_a_malformed_tagged_line_is_raw(forged: dict[str, Any]) -> None:
    fields = Line("stdout", "INFO", 1, 7, 8, "j", None, False, "t")._replace(**forged)
    data = b"\x1e" + json.dumps(list(fields)).encode()
    (record,) = lines().feed(data + b"\n", None)
    assert (record["stream"], record["message"]) == ("raw", data.decode())


@pytest.mark.parametrize("note", [{"left_out": [-3, 40]}, {"end": "j" * 1000}])
def test_a_malformed_note_is_raw(note: dict[str, Any]) -> None:
    reader = lines()
    assert [record["stream"] for record in reader.feed(pack_notice(note), None)] == ["raw"]
    assert reader.dropped == [0, 0]


@pytest.mark.parametrize("note", [{"left_out": [3, 40]}, {"left_out": [1, 2]}])
def test_lines_dropped_by_writers_are_counted(note: dict[str, Any]) -> None:
    reader = lines()
    assert reader.feed(pack_notice(note) * 2, None) == []
    assert reader.dropped == [2 * number for number in note["left_out"]]
