"""Output of handlers, however written: it reaches the queue's log with its job, whatever happens."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.drive.programs import shell, wait_for_counts
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until
from tests.support.thorough import examples

pytestmark = pytest.mark.timeout(180)

FLOOD_MB = int(os.environ.get("FORQ_TEST_FLOOD_MB", examples(50, 100)))


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="capacity = 1000\n") as forq:
        yield forq


def create(forq: Forq, name: str, function: str = "say", **options: object) -> None:
    settings = [f"--set={key}={value}" for key, value in options.items()]
    forq.ctl("create", name, "--handler", f"printing:{function}", "--path", str(HANDLERS), *settings)


def logs(forq: Forq, name: str, *more: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in forq.ctl("logs", name, "--json", "-n", "100000", *more).splitlines()]


def messages(forq: Forq, name: str, *more: str) -> list[str]:
    return [record["message"] for record in logs(forq, name, *more)]


def wait_for_message(forq: Forq, name: str, message: str) -> list[dict[str, Any]]:
    def found() -> list[dict[str, Any]]:
        records = logs(forq, name)
        return records if any(record["message"] == message for record in records) else []

    return wait_until(found, what=f"{message!r} in the log of {name}")  # type: ignore[no-any-return]


def _are(forq: Forq, name: str, job_id: str, expected: list[str]) -> bool:
    return messages(forq, name, "--job", job_id) == expected


def _are_more(forq: Forq, name: str, count: int) -> bool:
    return len(logs(forq, name)) > count


def said(forq: Forq, name: str, *ways: str) -> list[tuple[Any, ...]]:
    """Stream, level, job and message of each line of a job that writes in these ways."""
    create(forq, name)
    forq.client().queue(name).enqueue(ways, id=f"job-{name}")
    records = wait_for_message(forq, name, "said all")
    assert {record["queue"] for record in records} == {name}
    return [(record["stream"], record["level"], record.get("job"), record["message"]) for record in records[:-1]]


def test_printed_lines_have_their_stream_and_job(forq: Forq) -> None:
    job = "job-print"
    assert said(forq, "print", "print") == [
        ("stdout", "INFO", job, "printed job-print"),
        ("stderr", "INFO", job, "to stderr job-print"),
        ("stdout", "INFO", job, "in parts and one line"),
        ("stdout", "INFO", job, "bytes \\xff"),
        ("stdout", "INFO", job, "two"),
        ("stdout", "INFO", job, "lines"),
    ]
    assert logs(forq, "print")[0]["pid"] == forq.child("print")["pid"]
    wait_until(lambda: "INFO    print job-print: printed job-print\n" in forq.log, what="it is on stderr too")


def test_logged_lines_have_their_level_logger_and_traceback(forq: Forq) -> None:
    (informed, caught) = said(forq, "log", "log")
    assert informed == ("log", "INFO", "job-log", "informed job-log")
    assert caught[:3] == ("log", "ERROR", "job-log")
    assert caught[3].startswith("caught\nTraceback (most recent call last):\n")
    assert caught[3].endswith("KeyError: 'lost'")
    assert logs(forq, "log")[0]["logger"] == "my.lib"


def test_a_handler_s_own_logging_setup_is_kept_and_its_lines_have_the_job(forq: Forq) -> None:
    assert said(forq, "force", "force") == [("stderr", "INFO", "job-force", "mine: with a format of its own")]


def test_raw_writes_and_programs_of_the_only_running_job_belong_to_it(forq: Forq) -> None:
    assert said(forq, "raw", "raw", "subprocess") == [
        ("raw", "INFO", "job-raw", "raw job-raw"),
        ("raw", "INFO", "job-raw", "junk \x00\x1b[31m\\xff\\xfe\x1e{}"),
        ("raw", "INFO", "job-raw", "out of a program"),
        ("raw", "INFO", "job-raw", "err of a program"),
    ]
    assert "junk \\x00\\x1b[31m\\xff\\xfe\\x1e{}" in forq.ctl("logs", "raw"), "control codes are escaped"


def test_threads_pools_and_forks_of_the_only_running_job_belong_to_it(forq: Forq) -> None:
    found = said(forq, "threads", "threads", "fork")
    assert [line[2:] for line in found] == [
        ("job-threads", "of a thread"),
        ("job-threads", "of a pool"),
        ("job-threads", "of a fork"),
    ]


def test_a_handler_that_closes_descriptor_1_finds_no_log_lines_in_its_files(forq: Forq) -> None:
    assert said(forq, "close", "close") == [("stdout", "INFO", "job-close", "after it was closed")]
    assert Path(f"{forq.trace_file}.mine").read_text() == "only this"
    forq.client().queue("close").enqueue(["print"], id="next")
    wait_until(lambda: "printed next" in messages(forq, "close"), what="the next job prints")


def test_a_handler_that_replaces_stdout_keeps_its_replacement(forq: Forq) -> None:
    assert said(forq, "replace", "replace") == [("raw", "INFO", "job-replace", "<replaced>")]


def test_lines_of_the_tasks_of_a_coroutine_have_its_job(forq: Forq) -> None:
    create(forq, "async", "say_async")
    ids = forq.client().queue("async").enqueue_many(range(5))
    wait_for_counts(forq, "async", 5)
    for job_id in ids:
        expected = [f"of a task {job_id}", f"of a task {job_id}", f"of to_thread {job_id}"]
        wait_until(partial(_are, forq, "async", job_id, expected))


def test_with_concurrency_each_line_has_the_job_of_its_thread(forq: Forq) -> None:
    create(forq, "crew", "wait_and_say", concurrency=8)
    ids = forq.client().queue("crew").enqueue_many([50] * 16)
    wait_for_counts(forq, "crew", 16)
    wait_until(lambda: len(logs(forq, "crew")) == 16 * 100, what="all is there")
    for job_id in ids:
        expected = sorted(f"{job_id} {number}" for number in range(50) for _ in range(2))
        assert sorted(messages(forq, "crew", "--job", job_id)) == expected


def test_a_failed_attempt_is_one_record_with_its_traceback(forq: Forq) -> None:
    create(forq, "fails", "fail", max_retries=0)
    forq.client().queue("fails").enqueue(1, id="f")
    (record,) = wait_until(lambda: logs(forq, "fails"))
    assert (record["level"], record["job"], record["stream"], record["logger"]) == ("ERROR", "f", "log", "forq")
    headline = "job failed: attempt 1 of 1, failed for good (see: forqctl why fails f) error=ValueError: no good: 1"
    assert record["message"].startswith(f"{headline}\nTraceback")
    assert "printing.py" in record["message"]


def test_the_output_of_a_program_has_its_job(forq: Forq, tmp_path: Path) -> None:
    forq.ctl("create", "prog", "--handler", shell(tmp_path, "echo out; echo err >&2"))
    forq.client().queue("prog").enqueue(1, id="p")
    wait_until(lambda: len(logs(forq, "prog")) == 2)
    assert {(r["stream"], r["job"], r["message"]) for r in logs(forq, "prog")} == {
        ("stderr", "p", "out"),
        ("stderr", "p", "err"),
    }


def test_a_handler_that_cannot_be_imported_is_reported_in_the_log(forq: Forq, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("print('importing', flush=True)\nraise RuntimeError('no')\n")
    forq.ctl("create", "broken", "--handler", "broken:handle", "--path", str(tmp_path), "--no-wait")
    wait_for_message(forq, "broken", "importing")


def test_the_last_output_of_a_killed_process_is_kept(forq: Forq) -> None:
    create(forq, "dies", "die", max_stalls=0)
    forq.client().queue("dies").enqueue(1, id="d")
    assert wait_for_message(forq, "dies", "last words")[0]["job"] == "d"


def test_a_queue_name_may_have_every_allowed_character(forq: Forq) -> None:
    name = "..-_.ABCxyz0189" + "n" * 49
    create(forq, name)
    forq.client().queue(name).enqueue(["print"], id="!~{}\"\\'<>|&;$")
    records = wait_for_message(forq, name, "said all")
    assert {record["job"] for record in records} == {"!~{}\"\\'<>|&;$"}
    assert len(logs(forq, name, "--job", "!~{}\"\\'<>|&;$")) == len(records)
    assert logs(forq, name, "--job", "other") == []


@pytest.mark.fault("handler prints without end")
def test_a_line_of_10_mb_is_cut(forq: Forq) -> None:
    create(forq, "long", "long_line")
    forq.client().queue("long").enqueue(10_000_000, id="l")
    found = [record["message"] for record in wait_for_message(forq, "long", "short")]
    assert found[0] == "L" * 8192 + "…"
    raw = [message for message in found if message.startswith("R")]
    assert all(len(message) <= 8193 for message in raw)


def test_an_unfinished_line_is_shown_after_a_moment(forq: Forq, tmp_path: Path) -> None:
    create(forq, "dots", "dots")
    forq.client().queue("dots").enqueue(str(tmp_path / "go"), id="d")
    wait_for_message(forq, "dots", ".....")
    (tmp_path / "go").touch()


def test_logs_of_an_unknown_queue_exits_with_4_and_of_a_silent_one_is_empty(forq: Forq) -> None:
    assert forq.run_ctl("logs", "nobody").returncode == 4
    create(forq, "silent")
    assert forq.ctl("logs", "silent") == ""


def test_a_deleted_queue_leaves_its_lines_and_a_new_one_of_that_name_appends(forq: Forq) -> None:
    said(forq, "again", "print")
    forq.ctl("delete", "again")
    fifo = forq.state_dir / "logs" / "again" / "output.fifo"
    assert not fifo.exists()
    before = len(logs(forq, "again"))
    assert before > 3
    create(forq, "again")
    forq.client().queue("again").enqueue(["print"], id="second")
    wait_until(lambda: len(logs(forq, "again")) == 2 * before, what="both are there")


@pytest.mark.fault("handler prints without end")
@pytest.mark.parametrize("how", ["raw", "print"])
def test_a_flood_is_bounded_in_time_disk_and_memory_and_delays_no_neighbor(forq: Forq, how: str) -> None:
    queue, neighbor = f"flood-{how}", f"beside-{how}"
    create(forq, queue, "flood", timeout="120s")
    create(forq, neighbor)
    logger = next(s for s in forq.status()["supervisor"]["services"] if s["name"] == "logger")
    began, log_before = time.monotonic(), len(forq.log)
    forq.client().queue(queue).enqueue([how, FLOOD_MB], id="flood")
    answered: list[float] = []
    while forq.queue_status(queue)["done"] == 0:
        asked, job_id = time.monotonic(), f"n{len(answered)}"
        forq.client().queue(neighbor).enqueue([], id=job_id)
        wait_until(partial(messages, forq, neighbor, "--job", job_id), what="the lines of the neighbor arrive")
        answered.append(time.monotonic() - asked)
    seconds = time.monotonic() - began
    records = wait_for_message(forq, queue, "end of the flood")
    wait_until(
        lambda: any("; dropped lines=" in message for message in messages(forq, queue)),
        what="the dropped lines are reported",
    )
    sizes = [path.stat().st_size for path in (forq.state_dir / "logs" / queue).glob("output*.jsonl")]
    print(f"{how}: {FLOOD_MB} MB in {seconds:.1f} s, {sum(sizes)} bytes, neighbor at most {max(answered):.2f} s")
    assert all(size <= 8 << 20 for size in sizes)
    assert len(forq.log) - log_before < (32 << 20) + seconds * (4 << 20)
    assert max(answered) < 5.0
    assert seconds < 20 + FLOOD_MB / 20
    assert psutil.Process(logger["pid"]).memory_info().rss < 150 << 20
    assert psutil.Process(forq.child(queue)["pid"]).memory_info().rss < 150 << 20
    assert records[0]["job"] == "flood"


def test_a_logger_killed_repeatedly_loses_only_the_lines_in_its_buffer(forq: Forq, tmp_path: Path) -> None:
    create(forq, "killed", "say_slowly", timeout="60s")
    forq.client().queue("killed").enqueue(str(tmp_path / "stop"), id="k")
    for _ in range(3):
        wait_until(lambda: len(logs(forq, "killed")) > 20)
        service = next(s for s in forq.status()["supervisor"]["services"] if s["name"] == "logger")
        os.kill(service["pid"], signal.SIGKILL)
        written = len(logs(forq, "killed"))
        wait_until(partial(_are_more, forq, "killed", written + 20), 40.0, "its successor continues")
    (tmp_path / "stop").touch()
    wait_until(lambda: messages(forq, "killed")[-1].startswith("total"))
    *found, total = messages(forq, "killed")
    numbers = [int(message.split()[1]) for message in found if message.startswith("line")]
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= int(total.split()[1]) - 3 * 5
    assert "service died; restarting it service=logger" in forq.log


def test_a_frozen_logger_blocks_nobody_who_prints(forq: Forq) -> None:
    create(forq, "frozen", "flood", timeout="60s")
    forq.client().queue("frozen").enqueue(["print", 0], id="before")
    wait_for_message(forq, "frozen", "end of the flood")
    service = next(s for s in forq.status()["supervisor"]["services"] if s["name"] == "logger")
    os.kill(service["pid"], signal.SIGSTOP)
    try:
        began = time.monotonic()
        forq.client().queue("frozen").enqueue(["print", 5], id="during")
        wait_for_counts(forq, "frozen", 2)
        assert time.monotonic() - began < 10
    finally:
        with suppress(ProcessLookupError):  # it was replaced
            os.kill(service["pid"], signal.SIGCONT)

    def goes_on() -> list[str]:
        # Lines printed before the logger has made room again are counted as dropped, too.
        forq.client().queue("frozen").enqueue(["print", 0], id="after")
        return messages(forq, "frozen", "--job", "after")

    wait_until(goes_on, what="the log continues")
    assert any("; dropped lines=" in message for message in messages(forq, "frozen"))


def test_following_shows_every_line_across_rotations_and_ends_quietly() -> None:
    with running(settings='log_max = "64kb"\n') as forq:
        create(forq, "follow", "say_in_step", timeout="60s")
        stop = forq.directory / "stop"
        # Also all lines that exist when it begins: the job may have begun earlier.
        follower = forq.begin_ctl("logs", "follow", "-f", "--json", "-n", "1000")
        assert follower.stdout is not None
        forq.client().queue("follow").enqueue(str(stop), id="f")
        numbers: list[int] = []
        while len(numbers) < 1200:
            record = json.loads(follower.stdout.readline())
            numbers.append(int(record["message"].split()[1]))
            if len(numbers) % 100 == 0:
                (forq.directory / f"stop.{len(numbers)}").touch()
            if len(numbers) == 600:
                late = time.time() - time.mktime(time.strptime(record["time"][:19], "%Y-%m-%dT%H:%M:%S"))
                assert late + time.timezone < 3.0
        stop.touch()
        assert numbers == list(range(1200)), "no line is missing or repeated"
        files = forq.state_dir / "logs" / "follow"
        assert (files / "output.1.jsonl").exists()
        assert all(path.stat().st_size <= 64 << 10 for path in files.glob("output*.jsonl"))
        follower.send_signal(signal.SIGINT)
        _, complaint = follower.communicate(timeout=10)
        assert (follower.returncode, complaint) == (130, "")


def test_a_new_line_is_shown_within_half_a_second(forq: Forq) -> None:
    create(forq, "prompt")
    follower = forq.begin_ctl("logs", "prompt", "-f")
    assert follower.stdout is not None
    try:
        forq.client().queue("prompt").enqueue([], id="one")
        assert follower.stdout.readline().endswith("prompt one: said all\n")
        for number in range(3):
            began = time.monotonic()
            forq.client().queue("prompt").enqueue([], id=f"next{number}")
            assert follower.stdout.readline().endswith(f"next{number}: said all\n")
            assert time.monotonic() - began < 0.5
    finally:
        follower.kill()
        follower.communicate()


def test_everything_written_before_a_stop_is_kept() -> None:
    with running() as other:
        create(other, "last")
        other.client().queue("last").enqueue(["print"], id="x")
        wait_for_counts(other, "last", 1)
        assert other.stop() == 0
        files = other.state_dir / "logs" / "last" / "output.jsonl"
        assert json.loads(files.read_text().splitlines()[-1])["message"] == "said all"
        assert "last x: said all" in other.log


def test_the_json_log_has_queue_and_job_as_fields_for_forq_s_own_lines_too() -> None:
    with running(settings='log_format = "json"\nlog_level = "info"\n') as forq:
        create(forq, "q", "die", max_stalls=0)
        forq.client().queue("q").enqueue(1, id="d")
        wait_until(lambda: "child died" in forq.log)
        records = [json.loads(line) for line in forq.log.splitlines()[2:]]
        died = next(record for record in records if record["message"].startswith("child died"))
        assert (died["queue"], died["level"], died["logger"]) == ("q", "WARNING", "forq")
        wait_until(lambda: '"job":"d","stream":"stdout"' in forq.log)
