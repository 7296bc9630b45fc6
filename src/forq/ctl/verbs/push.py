"""push: one job from the command line, or one per line of a file, sent in chunks."""

from __future__ import annotations

import os
import sys

from forq.ctl.client import Client, connect
from forq.ctl.tables import printable, show_json
from forq.errors import ForqError, InvalidData, UsageError
from forq.procs import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator
    from typing import Any, BinaryIO

MAX_CHUNK_JOBS = 500
MAX_CHUNK_BYTES = 512 << 10
RECORD_KEYS = ("data", "id", "identifier", "priority", "type", "token", "run_at", "run_in")


class Chunk:
    """Jobs that are sent in one request, and the lines of the file they come from."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.numbers: list[int] = []
        self.bytes = 0
        # Of their lines in the file.
        self.file_bytes = 0
        self.first_line = 0
        self.last_line = 0

    def has_room_for(self, size: int) -> bool:
        return not self.jobs or (len(self.jobs) < MAX_CHUNK_JOBS and self.bytes + size <= MAX_CHUNK_BYTES)

    def add(self, job: dict[str, Any], size: int, line_number: int) -> None:
        self.jobs.append(job)
        self.numbers.append(line_number)
        self.bytes += size
        self.first_line = self.first_line or line_number
        self.last_line = line_number


def push(args: Namespace) -> int:
    if (args.data is None) == (args.file is None):
        raise UsageError("push needs either JSON or --file")
    return _push_one(args) if args.file is None else _push_file(args)


def _push_one(args: Namespace) -> int:
    if args.records:
        raise UsageError("--records goes with --file")
    data = wire.decode(os.fsencode(args.data))
    job = _with_given(args, ("id", "identifier", "priority", "token", "type"))
    how = {**_update(args), **_with_given(args, ("durable",))}
    result = connect(args).call("push", {"name": args.name, "data": data, **job, **_when(args), **how})
    if args.json:
        show_json(result)
    else:
        print(printable(result["id"]))
    return 0


def _push_file(args: Namespace) -> int:
    for name in ("id", "identifier", "token"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} names one job: with --file use --records")
    path = args.file if args.file == "-" else os.path.abspath(args.file)
    try:
        file = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115 (stdin must stay open)
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}") from exc
    pushed, requests = _push_chunks(args, connect(args), file, "stdin" if path == "-" else path)
    if args.json:
        show_json({"pushed": pushed, "requests": requests})
    else:
        print(f"pushed {pushed} {'job' if pushed == 1 else 'jobs'} to {args.name}")
    return 0


def _push_chunks(args: Namespace, client: Client, file: BinaryIO, path: str) -> tuple[int, int]:
    from forq.progress_line import ProgressLine

    progress = ProgressLine(lines=not args.json)
    size = os.fstat(file.fileno()).st_size
    pushed = requests = consumed = 0
    common = {"name": args.name, **_update(args), **_with_given(args, ("durable",))}
    try:
        for chunk in _chunks(args, file):
            try:
                result = client.call("push_many", {**common, "jobs": chunk.jobs})
            except ForqError as exc:
                raise type(exc)(f"lines {chunk.first_line} to {chunk.last_line}: {exc}") from exc
            pushed += sum(id is not None for id in result["ids"])
            requests += 1
            consumed += chunk.file_bytes
            progress.bar(consumed, size, f"{pushed} jobs pushed")
    except ForqError as exc:
        raise type(exc)(f"{path}: {exc}; pushed before: {pushed}") from exc
    except OSError as exc:
        raise ForqError(f"cannot read {path}: {exc.strerror}; pushed before: {pushed}") from exc
    finally:
        progress.clear()
    return pushed, requests


def _chunks(args: Namespace, file: BinaryIO) -> Iterator[Chunk]:
    defaults = {**_with_given(args, ("priority", "type")), **_when(args)}
    chunk = Chunk()
    line_number = 0
    while line := file.readline(wire.MAX_LINE_BYTES + 1):
        line_number += 1
        if not line.strip():
            continue
        job = {**defaults, **_job_on(line, line_number, args.records)}
        # As it is sent, without the spaces of the file but with the names of its fields.
        size = len(wire.encode(job)) + 1
        if not chunk.has_room_for(size):
            yield chunk
            chunk = Chunk()
        chunk.add(job, size, line_number)
        chunk.file_bytes += len(line)
    if chunk.jobs:
        yield chunk


def _job_on(line: bytes, number: int, is_record: bool) -> dict[str, Any]:
    if len(line) > wire.MAX_LINE_BYTES:
        raise InvalidData(f"line {number}: longer than {wire.MAX_LINE_BYTES} bytes")
    try:
        value = wire.decode(line)
    except InvalidData as exc:
        raise InvalidData(f"line {number}: {exc}") from exc
    if not is_record:
        return {"data": value}
    if not isinstance(value, dict) or "data" not in value:
        raise InvalidData(f'line {number}: a record is an object with "data"')
    for key in value:
        if key not in RECORD_KEYS:
            raise InvalidData(f"line {number}: unknown field {key!a}; allowed are {', '.join(RECORD_KEYS)}")
    return value


def _update(args: Namespace) -> dict[str, Any]:
    """What becomes of a job whose id is there."""
    given = _with_given(args, ("if_exists",))
    if args.no_update_data:
        given["update_data"] = False
    if args.update_run_at is not None:
        given["update_run_at"] = {"true": True, "false": False}.get(args.update_run_at, args.update_run_at)
    if args.reset_counts is not None:
        given["reset_counts"] = args.reset_counts == "yes"
    return given


def _when(args: Namespace) -> dict[str, Any]:
    if args.run_in is not None and args.run_at is not None:
        raise UsageError("--in and --at cannot be given both")
    if args.run_in is not None:
        from forq.values import parse_duration

        return {"run_in": parse_duration(args.run_in)}
    return {} if args.run_at is None else {"run_at": _time(args.run_at)}


def _time(text: str) -> float:
    """Epoch seconds, from a number or from ISO 8601 with a zone."""
    seconds = _epoch_seconds(text)
    # "not (0 <= x)" is true for NaN as well.
    if seconds is None or not 0 <= seconds < float("inf"):
        raise UsageError(
            f"--at {text!a} is not allowed: epoch seconds, or a date with a zone, from 1970 on (2026-12-01T09:00+01:00)"
        )
    return seconds


def _epoch_seconds(text: str) -> float | None:
    from datetime import datetime

    try:
        return float(text)
    except ValueError:
        pass
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if when.tzinfo is None else when.timestamp()


def _with_given(args: Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
