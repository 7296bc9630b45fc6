"""The output files of a queue: writing, rotating, reading with a cursor, removing."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from forq.errors import UnknownQueue, UsageError
from forq.output import files as files
from forq.output.files import CURRENT, PREVIOUS, OutputReader, RotatingFile, sweep


def record(number: int, job: str | None = None, size: int = 50) -> bytes:
    about: dict[str, Any] = {"time": f"2026-11-16T00:00:00.{number:06}Z", "level": "INFO"}
    if job is not None:
        about["job"] = job
    return json.dumps({**about, "message": f"{number} {'x' * size}"}, separators=(",", ":")).encode() + b"\n"


def numbers(answer: dict[str, Any]) -> list[int]:
    return [int(found["message"].split()[0]) for found in answer["records"]]


def read_all(reader: OutputReader, cursor: str | None = None, **how: Any) -> tuple[list[int], str, bool]:
    """Returns the lines from the cursor on, the last cursor, and whether lines were missing."""
    found, skipped = [], False
    how = {"tail": 10**6, "job": None, **how}
    while True:
        answer = reader.read("q", cursor, **how)
        found += numbers(answer)
        skipped = skipped or answer["skipped"]
        cursor = str(answer["cursor"])
        if not answer["more"]:
            return found, cursor, skipped


@pytest.fixture
def reader(tmp_path: Path) -> OutputReader:
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "output.fifo").touch()
    return OutputReader(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> RotatingFile:
    return RotatingFile(tmp_path / "q", 10_000)


def test_two_files_of_limited_size_contain_the_newest_lines(
    tmp_path: Path, file: RotatingFile, reader: OutputReader
) -> None:
    for begin in range(0, 1000, 10):
        file.append(record(number) for number in range(begin, begin + 10))
    assert all((tmp_path / "q" / name).stat().st_size <= 10_000 for name in (CURRENT, PREVIOUS))
    found, _, _ = read_all(reader)
    assert found == list(range(found[0], 1000))
    assert len(found) > 70


def test_one_large_batch_may_cause_several_rotations(tmp_path: Path, file: RotatingFile, reader: OutputReader) -> None:
    file.append(record(number) for number in range(1000))
    assert all((tmp_path / "q" / name).stat().st_size <= 10_000 for name in (CURRENT, PREVIOUS))
    assert read_all(reader)[0][-1] == 999


def test_a_truncated_line_does_not_affect_the_next_one(
    tmp_path: Path, file: RotatingFile, reader: OutputReader
) -> None:
    file.append([record(1)])
    file.close()
    with open(tmp_path / "q" / CURRENT, "ab") as opened:
        opened.write(record(2)[:-20])
    assert read_all(reader)[0] == [1]
    RotatingFile(tmp_path / "q", 10_000).append([record(3)])
    assert read_all(reader)[0] == [1, 3]


def test_a_removed_file_is_created_again(tmp_path: Path, file: RotatingFile, reader: OutputReader) -> None:
    file.append([record(1)])
    (tmp_path / "q" / CURRENT).unlink()
    file.append([record(2)])
    assert read_all(reader)[0] == [2]


def test_a_failed_write_raises_and_the_next_one_works(tmp_path: Path, reader: OutputReader) -> None:
    file = RotatingFile(tmp_path / "q", 10_000)
    (tmp_path / "q" / CURRENT).symlink_to("/dev/full")
    with pytest.raises(OSError, match=CURRENT):
        file.append([record(1)])
    (tmp_path / "q" / CURRENT).unlink()
    file.append([record(2)])
    os.dup2(os.open("/dev/full", os.O_WRONLY), file._fd)
    with pytest.raises(OSError, match="No space left"):
        file.append([record(3)])
    file.append([record(4)])
    assert read_all(reader)[0] == [2, 4]


@pytest.mark.parametrize("lines", [0, 1, 2, 17, 50, 70, 90, 100, 1000])
def test_the_last_lines_are_found_across_both_files(file: RotatingFile, reader: OutputReader, lines: int) -> None:
    file.append(record(number) for number in range(500))
    kept, _, _ = read_all(reader)
    assert read_all(reader, tail=lines)[0] == kept[max(0, len(kept) - lines) :]


def test_reading_in_pieces_returns_everything(tmp_path: Path, reader: OutputReader) -> None:
    RotatingFile(tmp_path / "q", 10_000_000).append(record(number, size=500) for number in range(5000))
    first = reader.read("q", None, tail=10**6, job=None)
    assert first["more"]
    assert sum(len(found["message"]) for found in first["records"]) < 200_000
    assert read_all(reader)[0] == list(range(5000))


def test_a_reader_may_select_the_lines_of_one_job(file: RotatingFile, reader: OutputReader) -> None:
    file.append(record(number, job=f'a"{number % 3}') for number in range(50))
    file.append([json.dumps({"time": "t", "level": "INFO", "message": '"job":"a\\"1"'}).encode() + b"\n"])
    assert read_all(reader, job='a"1')[0] == list(range(1, 50, 3))
    assert read_all(reader, job="other")[0] == []


@pytest.mark.parametrize("seed", range(20))
def test_a_cursor_skips_and_repeats_no_line_across_rotations(tmp_path: Path, seed: int) -> None:
    """If more was written than the files can hold, the answer reports it."""
    chance = random.Random(seed)
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "output.fifo").touch()
    file, reader = RotatingFile(tmp_path / "q", 3000), OutputReader(tmp_path)
    written, seen, cursor = 0, list[int](), None
    _, cursor, _ = read_all(reader, tail=0)
    for _ in range(300):
        count = chance.choice([0, 1, 3, 20])
        file.append([record(written + number, size=chance.randrange(60)) for number in range(count)])
        written += count
        if chance.random() < 0.1:
            file.close()
            file = RotatingFile(tmp_path / "q", 3000)
        if chance.random() < 0.7:
            found, cursor, skipped = read_all(reader, cursor)
            if skipped:
                assert found[0] > (seen[-1] if seen else -1)
            else:
                assert found == list(range(seen[-1] + 1 if seen else 0, written))
            seen += found
            assert not reader.has_more("q", cursor)
    assert seen == sorted(set(seen))


def test_a_cursor_into_removed_lines_reports_that_lines_are_missing(file: RotatingFile, reader: OutputReader) -> None:
    file.append(record(number) for number in range(10))
    _, cursor, _ = read_all(reader)
    file.append(record(number) for number in range(10, 1000))
    found, _, skipped = read_all(reader, cursor)
    assert skipped
    assert found[-1] == 999


@pytest.mark.parametrize("cursor", ["x", 1, "-:x", "0123456789abcdef", "../..:0", "0123456789abcdef:-1"])
def test_an_invalid_cursor_is_refused(file: RotatingFile, reader: OutputReader, cursor: Any) -> None:
    file.append([record(1)])
    with pytest.raises(UsageError, match="cursor"):
        reader.read("q", cursor, tail=1, job=None)


def test_a_queue_without_output_files_is_unknown(reader: OutputReader) -> None:
    assert read_all(reader)[0] == []
    with pytest.raises(UnknownQueue):
        reader.read("nobody", None, tail=1, job=None)


def test_the_output_of_some_deleted_queues_is_kept_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_STALE_QUEUES", 3)
    for number in range(6):
        directory = tmp_path / f"gone{number}"
        RotatingFile(directory, 10_000).append([record(1)])
        os.utime(directory / CURRENT, (1000.0 + number, 1000.0 + number))
    (tmp_path / "gone0" / "failed.jsonl").touch()
    RotatingFile(tmp_path / "served", 10_000).append([record(1)])
    os.utime(tmp_path / "served" / CURRENT, (1.0, 1.0))
    assert sorted(sweep(tmp_path, {"served"}, now=2000.0)) == ["gone0", "gone1", "gone2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gone0", "gone3", "gone4", "gone5", "served"]
    assert [path.name for path in (tmp_path / "gone0").iterdir()] == ["failed.jsonl"]
    assert sorted(sweep(tmp_path, {"served"}, now=1004.5 + 7 * 86400)) == ["gone3", "gone4"]
