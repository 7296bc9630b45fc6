"""The commands push (one job, or a file with one job per line) and recover (push the jobs of a failed log again).

Files are sent in chunks.
"""

from __future__ import annotations

import os
import sys

from forq.ctl.client import ControlClient, connect
from forq.ctl.command import NAME, NO_QUEUE, PRIORITY, TYPE, Argument, Command, duration, given
from forq.ctl.output import print_result, printable
from forq.errors import ForqError, InvalidData, UnknownQueue, UsageError
from forq.procs import jsonrpc
from forq.progress_line import ProgressLine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator
    from typing import Any, BinaryIO

MAX_CHUNK_JOBS = 500
MAX_CHUNK_BYTES = 512 << 10
# A line of a failed log has the data, which fits in a request, and the error with its traceback.
MAX_FAILED_LINE_BYTES = 2 * jsonrpc.MAX_LINE_BYTES
# Size of a request besides the job.
REQUEST_OVERHEAD_BYTES = 1024
# Of the skipped lines; there may be many.
MAX_LEFT_REPORTED = 10
# Options of one job, which override those of the queue.
OWN_OPTIONS = ("timeout", "max_retries", "backoff", "expires_in", "keep_done")
# What a job waits for.
WAITS_FOR = ("after", "when", "with_results")
RECORD_KEYS = (
    *("data", "id", "identifier", "priority", "type", "token", "run_at", "run_in"),
    *WAITS_FOR,
    *OWN_OPTIONS,
)


class Chunk:
    """The jobs of one request, and their lines in the file."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.numbers: list[int] = []
        self.bytes = 0
        # Size of their lines in the file.
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


def _parse_time(text: str) -> float:
    """Epoch seconds, from a number or ISO 8601 with a zone."""
    seconds = _epoch_seconds(text)
    # "not (0 <= x)" is true for NaN as well.
    if seconds is None or not 0 <= seconds < float("inf"):
        raise UsageError(
            f"--at {text!a} is not allowed: epoch seconds, or a date with a zone (2026-12-01T09:00+01:00), "
            "not before 1970"
        )
    return seconds


def _parse_delays(text: str) -> list[float]:
    from forq.values import parse_duration

    return [parse_duration(part.strip()) for part in text.split(",")]


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


@Command(
    "push",
    "add a job, or one per line of a file",
    NAME,
    Argument("data", nargs="?", metavar="JSON", help="the job's data"),
    Argument("--file", completes="file", metavar="F.jsonl", help="a file with one JSON value per line (-: stdin)"),
    Argument("--records", action="store_true", help="each line is an object with data, id, priority …"),
    Argument("--id", metavar="ID", help="the job id (default: a new one)"),
    Argument("--identifier", metavar="TEXT", help="a label for the job"),
    PRIORITY,
    Argument("--token", metavar="T", help="idempotency token: repeating the call adds no second job"),
    TYPE,
    duration("--in", "run after this delay (90s, 10m, 2h)", dest="run_in"),
    Argument(
        "--at",
        dest="run_at",
        type=_parse_time,
        metavar="TIME",
        help="run at this time or later (2026-12-01T09:00+01:00)",
    ),
    Argument("--after", action="append", metavar="ID", help="wait for this job of the queue; may be repeated"),
    Argument(
        "--when",
        choices=("done", "ended", "dead"),
        help="with --after: run once all are done (default), once all have ended, or once one is dead",
    ),
    Argument(
        "--with-results",
        action="store_const",
        const=True,
        help="with --after: the handler can read the results of those jobs",
    ),
    Argument(
        "--if-exists",
        choices=("update", "skip", "refuse"),
        help="what to do if a job with this id exists (default: update)",
    ),
    Argument("--no-update-data", action="store_true", help="if the job exists: keep its data"),
    Argument(
        "--update-run-at",
        choices=("true", "false", "if_later", "if_earlier"),
        help="if the job exists: change its time (default: true)",
    ),
    Argument(
        "--reset-counts", choices=("yes", "no"), help="if the job exists: reset its counts (default: same as its data)"
    ),
    Argument("--durable", choices=("replica",), help="wait until a replica of Redis has the job"),
    # --timeout is the timeout for an answer, for every command.
    duration("--job-timeout", "timeout of each attempt, instead of the queue's (30s)", dest="job_timeout"),
    Argument("--max-retries", type=int, metavar="N", help="retries, instead of the queue's max_retries"),
    Argument(
        "--backoff",
        type=_parse_delays,
        metavar="D,D",
        help="delays before the first, second ... retry (1s,5s,1m); the last one repeats",
    ),
    duration("--expires-in", "if it has not started by then, it is dead (1h)", dest="expires_in"),
    duration("--keep-done", "how long to keep its result, instead of the queue's keep_done (1h)", dest="keep_done"),
    more="Prints the job's id once it is stored. If a job with that id exists, it is updated; while it runs, the new "
    "job waits behind it.",
    examples=[
        'push mails \'{"to": "a@b.c"}\'  # one job',
        "push mails '{}' --in 1d --token nightly-17  # in one day; safe to repeat",
        "push mails --file mails.jsonl  # one per line",
        "push mails '{}' --after 01JD0Z --after 01JD10  # once these two jobs are done",
        "push mails '{}' --job-timeout 5m --max-retries 1 --expires-in 1h  # options of this job",
    ],
    json="the result of `push`; with --file `pushed` and `requests`, as numbers",
    exits={
        1: "refused: the queue is full, the job exists (--if-exists refuse), Redis is unreachable or out of memory",
        **NO_QUEUE,
    },
)
def push(args: Namespace) -> int:
    if (args.data is None) == (args.file is None):
        raise UsageError("push needs JSON or --file")
    return _push_one(args) if args.file is None else _push_file(args)


def _push_one(args: Namespace) -> int:
    if args.records:
        raise UsageError("--records needs --file")
    data = jsonrpc.decode(os.fsencode(args.data))
    job = {**given(args, "id", "identifier", "priority", "token", "type"), **_own_options(args), **_waits_for(args)}
    result = connect(args).call(
        "push", {"name": args.name, "data": data, **job, **_time_params(args), **_update_params(args)}
    )
    return print_result(args, result, printable(result["id"]))


def _push_file(args: Namespace) -> int:
    for name in ("id", "identifier", "token"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is for a single job; with --file use --records")
    file, path = _open_input(args.file)
    pushed, requests = _push_chunks(args, connect(args), file, path)
    text = f"pushed {pushed} {'job' if pushed == 1 else 'jobs'} to {args.name}"
    return print_result(args, {"pushed": pushed, "requests": requests}, text)


def _open_input(name: str) -> tuple[BinaryIO, str]:
    """The file, and its name in messages."""
    if name == "-":
        return sys.stdin.buffer, "stdin"
    path = os.path.abspath(name)
    try:
        return open(path, "rb"), path
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}") from exc


def _push_chunks(args: Namespace, client: ControlClient, file: BinaryIO, path: str) -> tuple[int, int]:
    progress = ProgressLine(lines=not args.json)
    size = os.fstat(file.fileno()).st_size
    pushed = requests = consumed = 0
    common = {"name": args.name, **_update_params(args)}
    try:
        for chunk in _chunks(args, file):
            try:
                result = client.call("push_many", {**common, "jobs": chunk.jobs})
            except ForqError as exc:
                raise type(exc)(f"lines {chunk.first_line} to {chunk.last_line}: {exc}") from exc
            pushed += sum(id is not None for id in result["ids"])
            requests += 1
            consumed += chunk.file_bytes
            progress.draw_bar(consumed, size, f"{pushed} jobs pushed")
    except ForqError as exc:
        raise type(exc)(f"{path}: {exc}; pushed so far: {pushed}") from exc
    except OSError as exc:
        raise ForqError(f"cannot read {path}: {exc.strerror}; pushed so far: {pushed}") from exc
    finally:
        progress.clear()
    return pushed, requests


def _chunks(args: Namespace, file: BinaryIO) -> Iterator[Chunk]:
    defaults = {**given(args, "priority", "type"), **_own_options(args), **_waits_for(args), **_time_params(args)}
    chunk = Chunk()
    line_number = 0
    while line := file.readline(jsonrpc.MAX_LINE_BYTES + 1):
        line_number += 1
        if not line.strip():
            continue
        job = {**defaults, **_parse_line(line, line_number, args.records)}
        # The size as sent: without the file's spaces, with the names of the fields.
        size = len(jsonrpc.encode(job)) + 1
        if not chunk.has_room_for(size):
            yield chunk
            chunk = Chunk()
        chunk.add(job, size, line_number)
        chunk.file_bytes += len(line)
    if chunk.jobs:
        yield chunk


def _parse_line(line: bytes, number: int, is_record: bool) -> dict[str, Any]:
    if len(line) > jsonrpc.MAX_LINE_BYTES:
        raise InvalidData(f"line {number}: longer than {jsonrpc.MAX_LINE_BYTES} bytes")
    try:
        value = jsonrpc.decode(line)
    except InvalidData as exc:
        raise InvalidData(f"line {number}: {exc}") from exc
    if not is_record:
        return {"data": value}
    if not isinstance(value, dict) or "data" not in value:
        raise InvalidData(f'line {number}: a record must be an object with "data"')
    for key in value:
        if key not in RECORD_KEYS:
            raise InvalidData(f"line {number}: unknown field {key!a}; allowed: {', '.join(RECORD_KEYS)}")
    return value


def _own_options(args: Namespace) -> dict[str, Any]:
    timeout = {} if args.job_timeout is None else {"timeout": args.job_timeout}
    return {**timeout, **given(args, "max_retries", "backoff", "expires_in", "keep_done")}


def _waits_for(args: Namespace) -> dict[str, Any]:
    found = given(args, *WAITS_FOR)
    if found and args.after is None:
        raise UsageError(f"--{next(iter(found)).replace('_', '-')} needs --after: the jobs to wait for")
    return found


def _update_params(args: Namespace) -> dict[str, Any]:
    """How to update an existing job, and how durably to store."""
    words = {"true": True, "false": False, "yes": True, "no": False}
    how = given(args, "if_exists", "update_run_at", "reset_counts", "durable")
    how = {name: words.get(value, value) for name, value in how.items()}
    return {**how, "update_data": False} if args.no_update_data else how


def _time_params(args: Namespace) -> dict[str, Any]:
    if args.run_in is not None and args.run_at is not None:
        raise UsageError("--in and --at cannot be combined")
    return given(args, "run_in", "run_at")


@Command(
    "recover",
    "push the jobs of a failed log again",
    Argument("file", completes="file", metavar="FILE", help="logs/NAME/failed.jsonl in the state directory (-: stdin)"),
    Argument("--queue", metavar="NAME", help="push to this queue instead of the original ones"),
    Argument("--dry-run", action="store_true", help="only count what would be pushed"),
    more="For jobs that are no longer among the dead jobs in Redis. A repeated run within dedup_ttl pushes only the "
    "lines that were skipped.",
    examples=["recover /var/lib/forq/logs/mails/failed.jsonl --dry-run  # count them first"],
    json="`recovered`, `already_there`, `left` and `broken`, as numbers of lines, and `dry_run`",
    exits={
        1: "some lines are invalid, or were skipped because a live job has the same id; they are listed",
        **NO_QUEUE,
    },
)
def recover(args: Namespace) -> int:
    from forq.values import check_queue_name

    if args.queue is not None:
        check_queue_name(args.queue)
    file, path = _open_input(args.file)
    recovery = Recovery(None if args.dry_run else connect(args), path, lines=not args.json)
    try:
        recovery.read(file, args.queue)
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}") from exc
    counts = {
        "recovered": recovery.recovered,
        "already_there": recovery.known,
        "left": recovery.left,
        "broken": recovery.broken,
        "dry_run": args.dry_run,
    }
    others = f"already there {recovery.known}, skipped {recovery.left}, broken {recovery.broken}"
    print_result(args, counts, f"{'would push' if args.dry_run else 'recovered'} {recovery.recovered}, {others}")
    if recovery.left:
        again = "run the command again when the live jobs with their ids have ended"
        print(f"forqctl: lines skipped: {recovery.left}; {again}", file=sys.stderr)
    return 1 if recovery.broken or recovery.left else 0


class Recovery:
    """One run over one file. Without a client it only counts."""

    def __init__(self, client: ControlClient | None, path: str, *, lines: bool) -> None:
        self.recovered = self.known = self.left = self.broken = 0
        self._client = client
        self._path = path
        self._progress = ProgressLine(lines=lines)
        self._queue = ""
        self._chunk = Chunk()

    def read(self, file: BinaryIO, queue: str | None) -> None:
        size, consumed, number = os.fstat(file.fileno()).st_size, 0, 0
        try:
            while line := file.readline(MAX_FAILED_LINE_BYTES + 1):
                number += 1
                consumed += len(line)
                self._add_line(line, number, queue)
                while len(line) > MAX_FAILED_LINE_BYTES and not line.endswith(b"\n"):
                    line = file.readline(MAX_FAILED_LINE_BYTES + 1)
                    consumed += len(line)
                self._progress.draw_bar(consumed, size, f"{self.recovered} jobs recovered")
            self._send_chunk()
        except ForqError as exc:
            raise type(exc)(f"{self._path}: {exc}; recovered so far: {self.recovered}") from exc
        finally:
            self._progress.clear()

    def _add_line(self, line: bytes, number: int, queue: str | None) -> None:
        if not line.strip():
            return
        try:
            own, job = parse_failed_line(line)
            size = len(jsonrpc.encode(job)) + 1
            if size + REQUEST_OVERHEAD_BYTES > jsonrpc.MAX_LINE_BYTES:
                raise InvalidData("the job is too large for the control socket")
        except UsageError as exc:
            self._report_broken(number, exc)
            return
        if (queue or own) != self._queue or not self._chunk.has_room_for(size):
            self._send_chunk()
        self._queue = queue or own
        self._chunk.add(job, size, number)

    def _report_broken(self, number: int, exc: ForqError) -> None:
        self.broken += 1
        self._report(number, str(exc))

    def _report(self, number: int, text: str) -> None:
        self._progress.clear()
        print(f"forqctl: {printable(f'{self._path}: line {number}: {text}')}", file=sys.stderr)

    def _send_chunk(self) -> None:
        chunk, self._chunk = self._chunk, Chunk()
        if not chunk.jobs:
            return
        try:
            self._push(chunk.jobs, chunk.numbers)
        except InvalidData:
            # One job is too large for the queue. Push them one by one to find it.
            for job, number in zip(chunk.jobs, chunk.numbers, strict=True):
                try:
                    self._push([job], [number])
                except InvalidData as exc:
                    self._report_broken(number, exc)
        except UnknownQueue as exc:
            raise UnknownQueue(f"line {chunk.first_line}: no queue {self._queue!r}") from exc
        except ForqError as exc:
            raise type(exc)(f"lines {chunk.first_line} to {chunk.last_line}: {exc}") from exc

    def _push(self, jobs: list[dict[str, Any]], numbers: list[int]) -> None:
        if self._client is None:
            self.recovered += len(jobs)
            return
        answer = self._client.call("recover", {"name": self._queue, "jobs": jobs})
        self.recovered += answer["recovered"]
        self.known += answer["known"]
        for at in answer["left"][: max(0, MAX_LEFT_REPORTED - self.left)]:
            self._report(numbers[at], f"skipped: job {jobs[at]['id']} of queue {self._queue} is live")
        self.left += len(answer["left"])


def parse_failed_line(line: bytes) -> tuple[str, dict[str, Any]]:
    """The queue of a line of a failed log, and the job as a parameter of `recover`."""
    from forq.values import check_job_id, check_queue_name, check_type

    if len(line) > MAX_FAILED_LINE_BYTES:
        raise InvalidData(f"longer than {MAX_FAILED_LINE_BYTES} bytes")
    entry = jsonrpc.decode(line)
    if not isinstance(entry, dict) or "data" not in entry:
        raise InvalidData('not an object with "data"')
    queue, job_id = check_queue_name(entry.get("queue")), check_job_id(entry.get("id"))
    job: dict[str, Any] = {"id": job_id, "data": entry["data"], "token": recovery_token(entry)}
    identifier, priority, job_type = entry.get("identifier"), entry.get("priority"), entry.get("type")
    if identifier is not None and identifier != job_id:
        if not isinstance(identifier, str):
            raise InvalidData("identifier must be text")
        job["identifier"] = identifier
    if priority is not None:
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 9:
            raise InvalidData("priority must be a number from 0 to 9")
        job["priority"] = priority
    if job_type is not None:
        job["type"] = check_type(job_type)
    return queue, job


def recovery_token(entry: dict[str, Any]) -> str:
    """Equal for all lines about the same end of the same job."""
    from hashlib import sha256

    end = entry.get("fence") if entry.get("fence") is not None else entry.get("enqueued_at")
    return "recover:" + sha256(f"{entry['queue']}\0{entry['id']}\0{end}".encode()).hexdigest()[:32]
