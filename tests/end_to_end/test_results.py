"""Results with a real supervisor: values returned by handlers of every kind, and clients that wait for them."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forq.broker.results import LOST
from forq.errors import ForqError, JobDead, NoResult
from tests.support.drive.bridge import bridge
from tests.support.drive.programs import create, python_program, shell
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="capacity = 1000\n") as forq:
        yield forq


def keep(forq: Forq, name: str, function: str, **options: object) -> None:
    handler = ("--handler", f"results:{function}", "--path", str(HANDLERS))
    settings = [f"--set={key}={value}" for key, value in {"keep_done": "1h", **options}.items()]
    forq.ctl("create", name, *handler, *settings)


class Waiting:
    """queue.wait of one client in many threads; collects each answer or exception."""

    def __init__(self, forq: Forq, queue: str, ids: list[str]) -> None:
        self._queue = forq.client().queue(queue)
        self._answers: dict[str, Any] = {}
        self._threads = [threading.Thread(target=self._wait, args=(job_id,), daemon=True) for job_id in ids]
        for thread in self._threads:
            thread.start()

    def _wait(self, job_id: str) -> None:
        try:
            self._answers[job_id] = self._queue.wait(job_id, 60)
        except ForqError as exc:
            self._answers[job_id] = exc

    @property
    def under_way(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def answers(self) -> dict[str, Any]:
        for thread in self._threads:
            thread.join(60)
        assert not self.under_way
        return self._answers


@pytest.mark.spec("M8")
def test_a_result_can_be_waited_for_and_is_shown_later(forq: Forq) -> None:
    keep(forq, "echo", "echo")
    queue = forq.client().queue("echo")
    value = {"ü": [1, 2.5, None, {"deep": "\u2028"}]}
    job_id = queue.enqueue(value, identifier="mine")
    assert queue.wait(job_id, timeout=30) == value
    job = queue.job(job_id)
    assert (job["state"], job["result"], job["identifier"], job["data"]) == ("done", value, "mine", value)
    assert forq.queue_status("echo")["kept"] == 1
    assert "KEPT" in forq.ctl("status")
    shown = forq.ctl("job", "echo", job_id)
    assert "state           done" in shown
    assert 'result          {"ü":[1,2.5,null,{"deep"' in shown
    assert job_id in forq.ctl("jobs", "echo", "--state", "done")
    assert forq.ctl("why", "echo", job_id).startswith("it was done at ")
    assert forq.ctl("watch", "echo", job_id).startswith('done: {"ü":[1,2.5,null')


def test_watch_ends_with_the_result(forq: Forq, tmp_path: Path) -> None:
    keep(forq, "watched", "gated")
    gate = tmp_path / "gate"
    job_id = forq.client().queue("watched").enqueue([str(gate), {"pages": 3}])
    wait_until(lambda: forq.client().queue("watched").job(job_id)["state"] == "active")
    watch = forq.begin_ctl("watch", "watched", job_id, "--json")
    assert watch.stdout is not None
    assert json.loads(watch.stdout.readline())["state"] == "active"
    gate.touch()
    *_, last = map(json.loads, watch.communicate(timeout=20)[0].splitlines())
    assert (last["state"], last["result"], watch.returncode) == ("done", {"pages": 3}, 0)


@pytest.mark.parametrize("function", ["echo", "echo_async"])
def test_each_job_of_a_large_batch_has_its_own_result(forq: Forq, function: str) -> None:
    name = f"many-{function}"
    keep(forq, name, function)
    queue = forq.client().queue(name)
    forq.ctl("pause", name)
    ids = queue.enqueue_many(range(1000))
    forq.ctl("resume", name)
    wait_until(lambda: queue.status()["kept"] == 1000)
    assert [queue.job(job_id)["result"] for job_id in ids] == list(range(1000))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("object", "not JSON: result is of type object"),
        ("recursive", "not JSON: Recursion limit"),
        ("deadly", "never"),
        ("nan", "NaN"),
        ("huge", "longer than max_data"),
    ],
)
def test_a_job_is_done_whatever_its_handler_returns(forq: Forq, what: str, reason: str) -> None:
    keep(forq, f"odd-{what}", "odd")
    queue = forq.client().queue(f"odd-{what}")
    job_id = queue.enqueue(what)
    with pytest.raises(NoResult, match=reason):
        queue.wait(job_id, 30)
    assert reason in queue.job(job_id)["result_error"]
    assert forq.ctl("watch", f"odd-{what}", job_id).startswith("done: no result: ")
    status = queue.status()
    assert (status["done"], status["failed"]) == (1, 0)


def test_waiting_for_a_dead_job_raises(forq: Forq) -> None:
    keep(forq, "bad", "odd")
    queue = forq.client().queue("bad")
    with pytest.raises(JobDead, match="no result") as caught:
        queue.wait(queue.enqueue("fail"), 30)
    assert isinstance(caught.value.error, dict)
    assert "in odd" in caught.value.error["traceback"]


def test_programs_can_return_results(forq: Forq, tmp_path: Path) -> None:
    program = python_program(tmp_path, 'say("job_finished", uuid=payload["uuid"], result={"n": data})\nreturn False')
    create(forq, "program", program, keep_done="1h")
    queue = forq.client().queue("program")
    assert [queue.wait(job_id, 30) for job_id in queue.enqueue_many([1, [2], None])] == [
        {"n": 1},
        {"n": [2]},
        {"n": None},
    ]
    create(forq, "silent", python_program(tmp_path, "return True", name="silent"), keep_done="1h")
    create(forq, "once", shell(tmp_path, "exit 0"), keep_done="1h")
    for name in ("silent", "once"):
        silent = forq.client().queue(name)
        assert silent.wait(silent.enqueue(1), 30) is None


def test_external_workers_can_return_results(forq: Forq) -> None:
    forq.ctl("create", "video", "--mode", "external", "--set", "keep_done=1h")
    worker = {"queue_name": "video", "worker_uuid": "w1"}
    with bridge(forq.url) as process:
        process.send("add_job", queue_name="video", uuid="j1", command="encode")
        process.request("worker_idle", "job_assignment", **worker)
        process.send("job_accepted", uuid="j1", **worker)
        waiting = Waiting(forq, "video", ["j1"])
        process.send("job_finished", uuid="j1", result={"frames": 30}, **worker)
        assert waiting.answers() == {"j1": {"frames": 30}}


def test_turning_results_off_removes_the_kept_ones(forq: Forq) -> None:
    keep(forq, "off", "echo")
    queue = forq.client().queue("off")
    queue.wait(queue.enqueue(1), 30)
    forq.ctl("set", "off", "keep_done=0")
    wait_until(lambda: queue.status()["kept"] == 0)


def test_jobs_before_a_slow_one_of_their_batch_keep_their_results_and_later_ones_run_elsewhere(
    forq: Forq, tmp_path: Path
) -> None:
    keep(forq, "slow", "slow_if_told", concurrency=2)
    forq.ctl("pause", "slow")
    queue, gate = forq.client().queue("slow"), tmp_path / "gate"
    values: list[Any] = [*range(300), [str(gate), "slow"], *range(301, 600)]
    ids = queue.enqueue_many(values)
    forq.ctl("resume", "slow")
    # Jobs behind it and of other batches end; jobs before it in its batch wait for it.
    wait_until(lambda: queue.status()["waiting"] == 0 and queue.job(ids[-1])["state"] == "done")
    assert queue.job(ids[300])["state"] == "active"
    gate.touch()
    wait_until(lambda: queue.status()["kept"] == 600)
    assert [queue.job(job_id).get("result") for job_id in ids] == [*range(300), "slow", *range(301, 600)]


def test_many_threads_wait_while_workers_are_killed(forq: Forq) -> None:
    keep(forq, "fire", "echo", concurrency=2)
    forq.ctl("pause", "fire")
    queue = forq.client().queue("fire")
    ids = queue.enqueue_many(range(60))
    waiting = Waiting(forq, "fire", ids)
    forq.ctl("resume", "fire")
    for _ in range(3):
        if pid := forq.child("fire")["pid"]:
            try:
                psutil.Process(pid).send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
    answers = waiting.answers()
    for number, job_id in enumerate(ids):
        lost = isinstance(answers[job_id], NoResult) and LOST in str(answers[job_id])
        assert lost or answers[job_id] == number


def test_waiters_get_their_results_although_redis_restarts_and_a_worker_dies_unreported(tmp_path: Path) -> None:
    with Server(appendonly=True) as server, running(redis=server.url) as forq:
        keep(forq, "survivor", "gated")
        keep(forq, "victim", "gated")
        gate = tmp_path / "gate"
        ids = {name: forq.client().queue(name).enqueue([str(gate), name]) for name in ("survivor", "victim")}
        wait_until(lambda: len(forq.traces("start")) == 2)
        waits = {name: Waiting(forq, name, [job_id]) for name, job_id in ids.items()}
        wait_until(lambda: server.connect().hlen("forq:queue:{victim}:waiters") == 1)
        pid = forq.child("victim")["pid"]
        server.stop()
        gate.touch()
        wait_until(lambda: len(forq.traces("end")) == 2)
        # It has returned, but its outcome cannot be reported.
        wait_until(lambda: "redis is gone; retrying queue=victim" in forq.log)
        os.kill(pid, signal.SIGKILL)
        assert all(waiting.under_way for waiting in waits.values())
        server.start()
        assert waits["survivor"].answers() == {ids["survivor"]: "survivor"}
        (lost,) = waits["victim"].answers().values()
        assert isinstance(lost, NoResult)
        assert LOST in str(lost)
        assert len(forq.traces("start")) == 2, "it is done, and does not run again"
