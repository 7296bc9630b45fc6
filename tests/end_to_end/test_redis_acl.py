"""etc/redis-acl.conf: forq works with it, and each user can do no more than the file says."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from forq import App, Client, Queue
from forq.broker.control import Control
from forq.broker.link import Link
from forq.broker.scripts import flags, script
from forq.client import new_job
from forq.errors import ForqError, QueueFull, RedisUnavailable, UnknownJob, UnknownQueue
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (ROOT / "etc" / "redis-acl.conf").read_text()
USERS = ("worker", "producer", "monitor")
# Used by the methods of a Queue (src/forq/client.py).
OF_CLIENTS = (
    *("enqueue", "cancel", "counts", "wait", "await", "unawait", "ack", "pause"),
    *("revive", "discard", "run_now"),
    *("set_schedule", "drop_schedule", "pause_schedule", "resume_schedule", "trigger"),
)
# Methods of a Queue that ask a supervisor: not for producers.
CONTROLS = {"kill", "stack", "logs", "restart"}

pytestmark = pytest.mark.timeout(180)


@contextmanager
def server_with_recipe(directory: Path) -> Iterator[Server]:
    """A server with the unchanged recipe, plus a user for the test itself."""
    conf = directory / "acl.conf"
    conf.write_text(RECIPE + "\nuser admin on >admin ~* &* +@all\n")
    with Server(include=conf, user="admin:admin@") as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_with_recipe(tmp_path_factory.mktemp("acl")) as server:
        yield server


def url(server: Server, user: str) -> str:
    return f"unix://forq-{user}:CHANGE-ME-{user}@{server.socket}"


@pytest.fixture(scope="module")
def forq(server: Server) -> Iterator[Forq]:
    with running(redis=url(server, "worker")) as forq:
        yield forq


def refusals(server: Server) -> list[str]:
    """Commands that the server has refused since the last call."""
    with server.connect() as admin:
        found = [f"{entry['username']}: {entry['reason']} {entry['object']}" for entry in admin.acl_log()]
        admin.acl_log_reset()
    return found


def commands(*verbs: str) -> set[str]:
    """Every command that these verbs may run, through any function of the library that they call."""
    text = re.sub(r"--[^\n]*", "", script("turn").library)
    functions = dict(re.findall(r"^(?:local )?function ([\w.]+)\(.*?\n(.*?)^end$", text, re.MULTILINE | re.DOTALL))
    short = [f"quick.{verb}" for verb in verbs if f"quick.{verb}" in functions]
    # How a call begins.
    reached, ahead = set[str](), [*(f"verbs.{verb}" for verb in verbs), *short, "open"]
    while ahead:
        name = ahead.pop()
        reached.add(name)
        called = set(re.findall(r"[\w.]+(?=\()|\b\w+\.\w+\b", functions[name])) & functions.keys()
        ahead += called - reached
    return {name.lower() for reach in reached for name in re.findall(r"redis\.p?call\('([A-Z]+)'", functions[reach])}


def allowed(user: str) -> set[str]:
    (rules,) = re.findall(rf"^user forq-{user} (.*)$", RECIPE, re.MULTILINE)
    return set(re.findall(r"\+(\S+)", rules))


def test_the_recipe_names_every_command_that_scripts_use() -> None:
    everything = {name.lower() for name in re.findall(r"redis\.p?call\('([A-Z]+)'", script("turn").library)}
    assert commands(*flags()) == everything
    assert everything <= allowed("worker")
    assert commands(*OF_CLIENTS) <= allowed("producer")
    assert commands("counts") <= allowed("monitor")


def test_no_user_may_harm_the_server_or_others() -> None:
    for user in USERS:
        assert not {"flushall", "flushdb", "keys", "scan", "shutdown", "script", "monitor", "replicaof"} & allowed(user)
        assert not [name for name in allowed(user) if name.startswith(("@", "config", "acl", "debug", "module"))]
    assert not {"eval", "function|load"} & (allowed("producer") | allowed("monitor"))


def test_a_supervisor_and_its_workers_need_no_other_commands(forq: Forq, server: Server) -> None:
    refusals(server)
    forq.create("w", "record", keep_done="1m", rate="1000/1s", max_active=4)
    forq.create("f", "fail", max_retries=1, min_backoff="10ms")
    forq.create("limited", "sleep", rate="5/1s")
    forq.ctl("create", "gate", "--mode", "auto_release")
    forq.ctl("create", "box", "--mode", "on_request")
    forq.ctl("create", "ext", "--mode", "external")
    forq.ctl("push", "w", "1", "--id", "a")
    forq.ctl("push", "w", "1", "--id", "b", "--in", "200ms")
    forq.ctl("schedule", "w", "often", "--every", "1s")
    forq.client().queue("w").enqueue_many(range(100))
    forq.ctl("push", "f", "1", "--id", "dead")
    for number in range(8):
        forq.ctl("push", "limited", "0", "--id", f"l{number}")
    forq.ctl("push", "box", "1", "--id", "x")
    assert forq.ctl("dequeue", "box", "--wait", "5s")
    forq.ctl("push", "gate", "1", "--id", "y")
    assert forq.ctl("await", "gate", "--wait", "10s")
    wait_until(lambda: forq.queue_status("f")["dead"] == 1, what="it is dead")
    for verb in (("dead", "list", "f"), ("dead", "show", "f", "dead"), ("dead", "retry", "f", "dead")):
        forq.ctl(*verb)
    wait_until(lambda: forq.queue_status("w")["done"] >= 103, what="all have run, a tick too")
    wait_until(lambda: forq.queue_status("limited")["done"] == 8, what="those with a rate have run")
    for looked in (("jobs", "w"), ("job", "w", "a"), ("why", "w", "a"), ("schedules", "w")):
        forq.ctl(*looked)
    for changed in ("pause", "resume"):
        forq.ctl(changed, "w")
    forq.ctl("set", "w", "timeout=10s")
    forq.ctl("restart", "w")
    forq.ctl("unschedule", "w", "often")
    forq.ctl("delete", "f", "--force")
    assert refusals(server) == []


def test_a_producer_may_enqueue_read_cancel_and_wait_and_nothing_else(forq: Forq, server: Server) -> None:
    forq.create("p", "record", keep_done="1m")
    forq.ctl("create", "pgate", "--mode", "auto_release")
    refusals(server)
    client = Client(url(server, "producer"))
    queue = client.queue("p")
    queue.enqueue({"n": 1}, id="one", token="t")
    queue.enqueue_many(range(10))
    queue.enqueue(1, id="later", run_in=3600)
    assert queue.cancel("later")
    wait_until(lambda: queue.status()["done"] == 11, what="all ran")
    assert queue.job("one")["state"] == "done"
    assert queue.jobs(state="done").jobs
    client.queue("pgate").enqueue(7, id="r")
    assert client.queue("pgate").wait_release("r", timeout=10).data == 7  # type: ignore[union-attr]
    assert client.queues()["p"] == "work"
    assert refusals(server) == []
    with pytest.raises(ForqError, match="NOPERM"):
        client.create_queue("mine")
    with redis.Redis.from_url(url(server, "producer")) as raw:
        refused = (("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("SET", "other", "1"), ("EVAL", "return 1", 0))
        for command in refused:
            with pytest.raises(redis.exceptions.NoPermissionError):
                raw.execute_command(*command)
        with pytest.raises(redis.exceptions.NoPermissionError):
            raw.execute_command("FUNCTION", "LOAD", script("enqueue").library)
        with pytest.raises(redis.exceptions.NoPermissionError):
            raw.hset("forq:queues", "p", "x")


def whole_api(client: Client) -> dict[str, Callable[[], object]]:
    """One call of each producer method of a queue, none of which depends on another user; and the expected error of
    those that document one."""
    work, gate, box = client.queue("api"), client.queue("api-gate"), client.queue("api-box")
    return {
        "enqueue": lambda: work.enqueue(1, id="a", run_in=3600),
        "enqueue_many": lambda: work.enqueue_many([], tokens=[]),
        "enqueue_jobs": lambda: work.enqueue_jobs([new_job(1, id="b", run_in=3600)]),
        "run_now": lambda: work.run_now("a"),
        "cancel": lambda: work.cancel("a"),
        "remove": lambda: work.remove("b"),
        "wait_release": lambda: gate.wait_release("x", timeout=0.01),
        "next_release": lambda: gate.next_release(timeout=0.01),
        "dequeue": box.dequeue,
        "wait": lambda: raises(UnknownJob, lambda: work.wait("gone", timeout=1)),
        "job": lambda: raises(UnknownJob, lambda: work.job("gone")),
        "jobs": work.jobs,
        "dead": work.dead,
        "retry_dead": lambda: work.retry_dead(["gone"]),
        "retry_dead_with_dependants": lambda: raises(UnknownJob, lambda: work.retry_dead_with_dependants("gone")),
        "discard_dead": lambda: raises(UnknownJob, lambda: work.discard_dead("gone")),
        "schedule": lambda: work.schedule("yearly", cron="0 0 1 1 *"),
        "schedules": work.schedules,
        "pause_schedule": lambda: work.pause_schedule("yearly"),
        "resume_schedule": lambda: work.resume_schedule("yearly"),
        "trigger": lambda: work.trigger("yearly"),
        "unschedule": lambda: work.unschedule("yearly"),
        "status": work.status,
        "pause": work.pause,
        "resume": work.resume,
        "drain": lambda: work.drain(timeout=60),
    }


def raises(expected: type[ForqError], call: Callable[[], object]) -> None:
    with pytest.raises(expected):
        call()


def create_for_api(forq: Forq) -> None:
    forq.ctl("create", "api", "--handler", "traced:noop", "--path", str(HANDLERS), "--set=keep_done=1m")
    forq.ctl("create", "api-gate", "--mode", "auto_release")
    forq.ctl("create", "api-box", "--mode", "on_request")


def call_whole_api(server: Server) -> None:
    """Waits until the server has the functions of clients, then makes every call."""
    client = Client(url(server, "producer"))
    # Queues that a server lost are created again one by one.
    wait_until(lambda: not fails(client.queues) and client.queues().keys() >= {"api", "api-gate", "api-box"}, 60)
    wait_until(lambda: not fails(lambda: client.queue("api").schedule("yearly", cron="0 0 1 1 *")), 60)
    for call in whole_api(client).values():
        call()


def fails(call: Callable[[], object]) -> bool:
    try:
        call()
    except (RedisUnavailable, UnknownQueue):
        return True
    return False


def test_a_producer_may_call_every_queue_method_without_another_user_calling_it_first(tmp_path: Path) -> None:
    with server_with_recipe(tmp_path) as server, running(redis=url(server, "worker")) as forq:
        create_for_api(forq)
        client = Client(url(server, "producer"))
        assert set(whole_api(client)) | CONTROLS == {name for name in vars(Queue) if not name.startswith("_")}
        call_whole_api(server)
        # Without the library on the server, the producer first tried to load it, then EVAL.
        others = [line for line in refusals(server) if "load" not in line and "eval" not in line]
        assert [line for line in others if "producer" in line] == []


@pytest.mark.parametrize("how", ["flush", "restart"])
def test_producer_functions_are_restored_after_the_server_lost_them(tmp_path: Path, how: str) -> None:
    with (
        server_with_recipe(tmp_path) as server,
        running(redis=url(server, "worker"), settings='heartbeat = "1s"\nexpiry = "10s"\n') as forq,
    ):
        create_for_api(forq)
        call_whole_api(server)
        if how == "flush":
            with server.connect() as admin:
                admin.function_flush()
        else:
            server.restart()
        client = Client(url(server, "producer"))
        wait_until(lambda: not fails(lambda: client.queue("api").enqueue(1)), 60)
        call_whole_api(server)


def test_a_producer_that_connects_before_the_functions_exist_gets_a_clear_error(tmp_path: Path) -> None:
    with server_with_recipe(tmp_path) as server:
        Client(server.url).create_queue("early")
        with server.connect() as admin:
            admin.function_flush()
        with pytest.raises(
            RedisUnavailable, match=r"supervisor of this release loads them.*forq app.*--create.*NOPERM"
        ):
            Client(url(server, "producer")).queue("early").enqueue(1)


def early_task(number: int) -> None: ...


def test_a_producer_of_tasks_needs_queues_that_a_deploy_step_creates(tmp_path: Path) -> None:
    with server_with_recipe(tmp_path) as server:
        producing, deploying = (App("early", url=url(server, user)) for user in ("producer", "worker"))
        task = producing.task(early_task)
        with pytest.raises(RedisUnavailable, match=r"forq app MODULE:APP --create"):
            task.enqueue(1)
        deploying.queue("other")
        assert deploying.create_queue("other")
        with pytest.raises(UnknownQueue, match=r"may not create it.*forq app MODULE:APP --create"):
            task.enqueue(1)
        deploying.queue("early", max_items=1)
        assert deploying.create_queue("early")
        task.enqueue(1)
        with pytest.raises(QueueFull):
            task.enqueue(2)


def test_a_monitor_may_read_and_change_nothing(forq: Forq, server: Server) -> None:
    forq.create("m", "record")
    forq.ctl("pause", "m")
    forq.ctl("push", "m", "1", "--id", "one")
    refusals(server)
    client = Client(url(server, "monitor"))
    assert client.queue("m").status()["waiting"] == 1
    assert client.queue("m").job("one")["data"] == 1
    assert [job["id"] for job in client.queue("m").jobs().jobs] == ["one"]
    assert client.queues()["m"] == "work"
    assert refusals(server) == []
    for change in (lambda: client.queue("m").enqueue(1), lambda: client.queue("m").cancel("one")):
        with pytest.raises(ForqError, match=r"(?i)permission|can't run this command"):  # the latter on Redis 7.0
            change()
    assert client.queue("m").status()["waiting"] == 1


def test_only_the_user_of_supervisors_may_control_them(tmp_path: Path) -> None:
    with (
        server_with_recipe(tmp_path) as server,
        running(redis=url(server, "worker"), settings='remote_control = "full"\n') as forq,
    ):
        forq.create("c", "act")
        worker, producer, monitor = (Client(url(server, user)) for user in USERS)
        wait_until(lambda: "c" in worker.supervisors()[0]["queues"], what="it is announced")
        producer.queue("c").enqueue({"do": "hang"}, id="a")
        wait_until(lambda: forq.child("c")["job"] == "a", what="it runs")
        refusals(server)
        [target] = monitor.supervisors()
        assert refusals(server) == []
        for queue in (producer.queue("c"), monitor.queue("c")):
            for call in (lambda: queue.kill("a"), queue.stack, queue.logs, queue.restart):  # noqa: B023
                with pytest.raises(ForqError, match=r"(?i)permission|can't run this command"):
                    call()
        # They can skip what the client checks, and still reach nothing.
        requests = f"forq:{{control}}:requests:{target['processor']}"
        for user in ("producer", "monitor"):
            control = Control(Link(url(server, user)), "forq:")
            with pytest.raises(ForqError, match=r"(?i)permission|can't run this command"):
                control.send(target, "kill", {"name": "c", "id": "a", "fence": 1})
            with redis.Redis.from_url(url(server, user)) as raw:
                for command in (("RPUSH", requests, "x"), ("PUBLISH", f"forq:{{control}}@0:{requests}", "x")):
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        raw.execute_command(*command)
        assert forq.child("c")["job"] == "a"
        assert "remote request" not in forq.log
        refusals(server)
        assert [stack["job"] for stack in worker.queue("c").stack()] == ["a"]
        assert worker.queue("c").kill("a")["outcome"] == "cancelled"
        worker.queue("c").restart()
        assert isinstance(worker.queue("c").logs(), list)
        assert refusals(server) == []


def test_no_user_connects_without_a_password(server: Server) -> None:
    with redis.Redis.from_url(f"unix://{server.socket}") as raw, pytest.raises(redis.exceptions.AuthenticationError):
        raw.ping()
    with pytest.raises(ForqError, match="WRONGPASS"):
        Client(f"unix://forq-worker:wrong@{server.socket}").queues()
