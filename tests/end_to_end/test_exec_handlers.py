"""Queues whose handler is a program: the data it gets, and every way in which it fails."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.drive.programs import actor, create, instances, pids_in_log, python_program, shell, wait_for_counts
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)

EXAMPLES = Path(__file__).resolve().parents[2] / "etc" / "examples"


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="capacity = 1000\n") as forq:
        yield forq


def error_of(forq: Forq, queue: str, job_id: str) -> dict[str, Any]:
    return json.loads(forq.ctl("dead", "show", queue, job_id, "--json"))["error"]  # type: ignore[no-any-return]


def test_data_of_every_kind_reaches_one_instance_unchanged(forq: Forq, tmp_path: Path) -> None:
    create(forq, "data", actor(tmp_path))
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    odd = 'ü \u2028 \U0001f600 \0 \\ " \n'
    values = [None, 0, -1.5, 2**53, "", odd, {"": {}}, deep, "x" * 900_000, {"a": [1, {}]}]
    ids = forq.client().queue("data").enqueue_many(values)
    wait_for_counts(forq, "data", len(values))
    seen = [json.loads((tmp_path / job_id).read_text()) for job_id in ids]
    assert [data for _, data in seen] == values
    assert {pid for pid, _ in seen} == instances(forq, "data")


def test_a_thousand_jobs_go_through_one_instance(forq: Forq, tmp_path: Path) -> None:
    create(forq, "many", actor(tmp_path))
    ids = forq.client().queue("many").enqueue_many(range(1000))
    wait_for_counts(forq, "many", 1000)
    seen = [json.loads((tmp_path / job_id).read_text()) for job_id in ids]
    assert [data for _, data in seen] == list(range(1000))
    assert len({pid for pid, _ in seen}) == 1


@pytest.mark.parametrize(
    ("do", "name", "kind", "message"),
    [
        ("exit", "ExitStatus", "retriable", "the program exited with status 3"),
        ("signal", "ExitSignal", "retriable", "signal 11 (SIGSEGV)"),
        ("noise", "BadMessage", "retriable", "not JSON: 'Listening on port 80'"),
        ("other", "BadMessage", "retriable", "about another job, uuid 'another'"),
        ("fail", "Odd", "permanent", "ü"),
    ],
)
def test_every_way_to_fail_shows_in_the_dead_job_and_the_next_job_runs(
    forq: Forq, tmp_path: Path, do: str, name: str, kind: str, message: str
) -> None:
    queue, bad = f"fails-{do}", f"bad-{do}"
    create(forq, queue, actor(tmp_path), max_retries=0)
    jobs = forq.client().queue(queue)
    jobs.enqueue({"do": do, "how": {"error": {"name": "Odd", "message": "ü"}, "kind": "permanent"}}, id=bad)
    wait_for_counts(forq, queue, 0, 1)
    error = error_of(forq, queue, bad)
    assert (error["name"], error["kind"]) == (name, kind)
    assert message in error["message"]
    (pid,) = pids_in_log(forq, bad)
    assert error["traceback"] == f"pid {pid}", "what it wrote to stderr"
    assert name in forq.ctl("dead", "show", queue, bad)
    assert forq.queue_status(queue)["children"][0]["restarts"] == 0, "only the instance is replaced"
    jobs.enqueue(1, id="good")
    wait_for_counts(forq, queue, 1, 1)
    stayed = json.loads((tmp_path / "good").read_text())[0] == pid
    assert stayed == (do == "fail")


def test_a_program_may_set_the_time_of_the_next_attempt(forq: Forq, tmp_path: Path) -> None:
    create(forq, "later", actor(tmp_path))
    at = time.time() + 500
    forq.client().queue("later").enqueue({"do": "fail", "how": {"error": "later", "retry_at": at}}, id="l")
    wait_until(lambda: forq.queue_status("later")["scheduled"] == 1, what="it is scheduled")
    shown = forq.client().queue("later").job("l")
    assert shown["run_at"] == pytest.approx(at, abs=0.01)
    assert shown["retry_count"] == 1


def test_a_program_that_cannot_be_run_is_a_config_error_and_one_that_vanishes_fails_its_job(
    forq: Forq, tmp_path: Path
) -> None:
    program = tmp_path / "program.sh"
    refused = forq.run_ctl("create", "none", "--handler", f"exec:{program}")
    assert (refused.returncode, f"{program} is not a file" in refused.stderr) == (1, True)
    forq.ctl("create", "none", "--handler", f"exec:{program}", "--set", "max_retries=0", "--no-wait")
    wait_until(lambda: forq.queue_status("none")["state"] == "config_error", what="config_error")
    assert f"{program} is not a file" in forq.ctl("status", "none")
    shell(tmp_path, "exit 0")
    forq.ctl("restart", "none")
    forq.wait_for_child("none")
    program.unlink()
    forq.client().queue("none").enqueue(1, id="n")
    wait_for_counts(forq, "none", 0, 1)
    assert error_of(forq, "none", "n")["name"] == "CannotStart"
    done = forq.run_ctl("create", "bad", "--handler", "exec:relative")
    assert (done.returncode, "absolute path" in done.stderr) == (2, True)


def test_a_gigabyte_on_stderr_and_noise_on_stdout_cost_one_attempt_and_no_memory(forq: Forq, tmp_path: Path) -> None:
    create(forq, "flood", actor(tmp_path), max_retries=0)
    before = len(forq.log)
    jobs = forq.client().queue("flood")
    jobs.enqueue({"do": "flood"}, id="flood")
    wait_for_counts(forq, "flood", 0, 1)
    assert error_of(forq, "flood", "flood")["name"] == "BadMessage"
    assert len(forq.log) - before < 5_000_000
    wait_until(lambda: "lines_dropped=" in forq.log, what="dropped lines are counted")
    assert psutil.Process(forq.child("flood")["pid"]).memory_info().rss < 200 << 20
    jobs.enqueue(1, id="after")
    wait_for_counts(forq, "flood", 1, 1)


def test_each_worker_has_its_own_instance_and_they_run_in_parallel(forq: Forq, tmp_path: Path) -> None:
    create(forq, "crew", actor(tmp_path), concurrency=4)
    jobs = forq.client().queue("crew")
    ids = [jobs.enqueue({"do": "sleep", "seconds": 2}, id=f"crew{number}") for number in range(4)]
    wait_until(lambda: all(pids_in_log(forq, job_id) for job_id in ids), what="all four run")
    assert forq.queue_status("crew")["done"] == 0
    pids = {pids_in_log(forq, job_id)[0] for job_id in ids}
    wait_for_counts(forq, "crew", 4)
    assert len(pids) == 4
    assert instances(forq, "crew") == pids


def test_each_type_has_its_own_program_beside_a_handler_in_python(forq: Forq, tmp_path: Path) -> None:
    one = python_program(tmp_path, "note('one')", name="one")
    types = ("--type", f"one={one}", "--type", f"two={shell(tmp_path, 'echo two')}", "--path", str(HANDLERS))
    create(forq, "typed", "traced:record", *types)
    jobs = forq.client().queue("typed")
    for number, job_type in enumerate((None, "one", "two", "one")):
        jobs.enqueue(1, id=f"typed{number}", type=job_type)
    wait_for_counts(forq, "typed", 4)
    assert {trace.job for trace in forq.traces("end") if trace.queue == "typed"} == {"typed0"}

    def printed() -> list[str]:
        return [line.partition(" typed ")[2] for line in forq.log.splitlines() if " typed typed" in line]

    wait_until(lambda: printed() == ["typed1: one", "typed2: two", "typed3: one"], what="the lines of all programs")


def test_the_fail_handler_may_be_a_program(forq: Forq, tmp_path: Path) -> None:
    fail = shell(tmp_path, f'cat > "{tmp_path}/failed.tmp"; mv "{tmp_path}/failed.tmp" "{tmp_path}/failed"', "fail")
    create(forq, "failing", shell(tmp_path, "exit 65"), "--fail-handler", fail)
    forq.client().queue("failing").enqueue({"n": 1}, id="f")
    wait_until((tmp_path / "failed").exists, what="the fail handler ran")
    data, original, error = json.loads((tmp_path / "failed").read_text())
    assert (data, original["id"]) == ({"n": 1}, "f")
    assert error == {"name": "ExitStatus", "message": "the program exited with status 65", "kind": "permanent"}
    assert forq.client().queue("failing").job("f")["retry_count"] == 0


def test_the_exec_once_example_stores_its_data(forq: Forq, tmp_path: Path) -> None:
    create(forq, "keep", f"exec-once:{EXAMPLES}/exec_once.sh {tmp_path}", max_retries=0)
    jobs = forq.client().queue("keep")
    jobs.enqueue({"a": "ü"}, id="kept")
    jobs.enqueue(1, id="not/kept")
    wait_for_counts(forq, "keep", 1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert json.loads((tmp_path / "kept.json").read_text()) == {"a": "ü"}
    wait_until(lambda: "keep kept: kept kept of keep, attempt 1" in forq.log, what="its line is in the log")
    error = error_of(forq, "keep", "not/kept")
    assert (error["kind"], error["message"].endswith("an id with a slash is no file name")) == ("permanent", True)


def test_the_sh_example_answers_each_job(forq: Forq) -> None:
    create(forq, "sh", f"exec:{EXAMPLES}/exec_worker.sh")
    forq.client().queue("sh").enqueue_many([{"uuid": 'no"'}] * 20)
    wait_for_counts(forq, "sh", 20)
    assert len(instances(forq, "sh")) == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here")
def test_the_node_example_works_fails_and_greets(forq: Forq) -> None:
    create(forq, "node", f"exec:{shutil.which('node')} {EXAMPLES}/exec_worker.js", max_retries=0)
    jobs = forq.client().queue("node")
    jobs.enqueue({"greet": "wörld", "steps": 3}, id="greet")
    jobs.enqueue({"fail": "no good", "permanent": True}, id="bad")
    jobs.enqueue_many([None] * 50)
    wait_for_counts(forq, "node", 51, 1)
    wait_until(lambda: "node greet: hello, wörld" in forq.log, what="its line is in the log")
    error = error_of(forq, "node", "bad")
    assert (error["name"], error["message"], error["kind"]) == ("Error", "no good", "permanent")
    assert "exec_worker.js" in error["traceback"]


def test_the_progress_of_a_program_is_shown(forq: Forq, tmp_path: Path) -> None:
    act = """\
say("worker_progress", uuid=payload["uuid"], progress=0.4, text="page 12 of 30")
while not os.path.exists(data): time.sleep(0.01)
"""
    create(forq, "far", python_program(tmp_path, act))
    forq.ctl("push", "far", json.dumps(str(tmp_path / "go")), "--id", "book")

    def reported() -> Any:
        return json.loads(forq.ctl("job", "far", "book", "--json"))["progress"]

    progress = wait_until(reported)
    assert (progress["fraction"], progress["text"]) == (0.4, "page 12 of 30")
    wait_until(lambda: "40% page 12 of 30" in psutil.Process(forq.child("far")["pid"]).cmdline()[0])
    (tmp_path / "go").touch()
    wait_for_counts(forq, "far", 1)
