"""restart and create wait for the import of the handler; the old process serves the queue until the new one can."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forq.ctl.client import ControlClient
from forq.errors import UnknownQueue, UsageError
from tests.support.drive.handler_module import Module
from tests.support.drive.processes import alive, tree_of
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)

GOOD = "from traced import record as handle, on_fail as failed\n"
BROKEN = "import time\n\nRATE = rat * 2\n"


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


@pytest.fixture
def module(tmp_path: Path) -> Module:
    made = Module(tmp_path, f"shop_{os.urandom(4).hex()}")
    made.write(GOOD)
    return made


def hangs(module: Module, *, then: str = GOOD) -> Path:
    """The import writes its pid to a file `importing`, starts a program, and waits for the returned file."""
    gate = module.directory / "gate"
    module.write(
        "import os, subprocess, time\n"
        f"with open({str(module.directory / 'importing')!r}, 'a') as noted: print(os.getpid(), file=noted)\n"
        "subprocess.Popen(['sleep', '600'])\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n{then}"
    )
    return gate


def importing(module: Module) -> list[int]:
    noted = module.directory / "importing"
    return [int(line) for line in noted.read_text().splitlines()] if noted.exists() else []


def pids(forq: Forq, name: str) -> list[int]:
    return [child["pid"] for child in forq.queue_status(name)["children"] if child["pid"] is not None]


def _without_warden(pids: set[int]) -> set[int]:
    """The first clean-up after a dead child starts the warden."""
    titles = {process.pid: process.info["cmdline"] for process in psutil.process_iter(["cmdline"])}
    return {pid for pid in alive(pids) if "forq: warden" not in "".join(titles.get(pid) or ())}


def serves(forq: Forq, name: str, pid: int) -> None:
    """Checks that a job runs now, in this process."""
    job_id = forq.client().queue(name).enqueue(1)
    ran = wait_until(lambda: [t for t in forq.traces("end") if (t.queue, t.job) == (name, job_id)], what="it ran")
    assert [trace.pid for trace in ran] == [pid]


def check_traceback(text: str, file: Path) -> None:
    """Checks that it shows where the module failed, without frames of forq or importlib."""
    lines = text.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.strip().startswith("Traceback"))
    frames = [line.strip() for line in lines[begin:] if line.strip().startswith("File ")]
    assert frames == [f'File "{file}", line 3, in <module>']
    assert any(line.strip() == "NameError: name 'rat' is not defined" for line in lines[begin:])


@pytest.mark.parametrize("failing", ["handler", "fail handler"])
def test_a_restart_whose_handler_cannot_be_imported_keeps_the_old_process(
    forq: Forq, module: Module, tmp_path: Path, failing: str
) -> None:
    name = f"kept-{len(failing)}"
    fails = Module(tmp_path, f"{module.name}_fails")
    fails.write(GOOD)
    forq.ctl("create", name, *module.arguments(), f"--fail-handler={fails.name}:failed")
    old = forq.wait_for_child(name)["pid"]
    changed = module if failing == "handler" else fails
    changed.write(BROKEN)
    done = forq.run_ctl("restart", name)
    assert done.returncode == 1
    assert done.stdout == ""
    first, *trace, last = done.stderr.splitlines()
    assert first.startswith(f"forqctl: queue '{name}' is not restarted: handler '{changed.name}:")
    assert f"NameError: name 'rat' is not defined ({changed.file}, line 3)" in first
    assert first.endswith(f"; its old process keeps running (pid {old})")
    check_traceback("\n".join(trace), changed.file)
    assert last == f"forqctl: fix it, then run: forqctl restart {name}"
    assert len(pids(forq, name)) == 2, "nothing is left of the new processes"
    serves(forq, name, old)

    shown = forq.ctl("status", name)
    assert f"{name}: still runs older code: restart failed at 20" in shown
    check_traceback(shown, changed.file)
    assert "Traceback" not in forq.ctl("status"), "the overview has one line for it"
    forq.ctl("pause", name)
    waiting = forq.ctl("push", name, "1")
    assert "its queue runs older code because a restart failed: handler" in forq.ctl("why", name, waiting)
    forq.ctl("resume", name)
    machine = forq.run_ctl("restart", name, "--json")
    error = json.loads(machine.stdout)["error"]
    assert (machine.returncode, error["code"]) == (1, "cannot_import")
    check_traceback(error["traceback"], changed.file)

    changed.write(GOOD)
    assert forq.ctl("restart", name) == f"restarted {name}"
    new = forq.wait_for_child(name, not_pid=old)["pid"]
    serves(forq, name, new)
    assert forq.queue_status(name)["restart_error"] is None
    assert not alive({old})


def test_a_queue_whose_handler_cannot_be_imported_is_not_created(forq: Forq, module: Module) -> None:
    module.write(BROKEN)
    before = tree_of(forq.state_dir)
    done = forq.run_ctl("create", "unmade", *module.arguments())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("forqctl: queue 'unmade' is not created: handler ")
    check_traceback(done.stderr, module.file)
    assert "unmade" not in forq.client().queues()
    with pytest.raises(UnknownQueue):
        forq.status("unmade")
    assert not (forq.state_dir / "queues" / "unmade.json").exists()
    wait_until(lambda: _without_warden(tree_of(forq.state_dir) - before) == set(), what="its processes are gone")
    module.write(GOOD)
    assert forq.ctl("create", "unmade", *module.arguments()) == "created unmade"
    serves(forq, "unmade", forq.wait_for_child("unmade")["pid"])


def test_create_with_no_wait_creates_the_queue_and_keeps_the_traceback(forq: Forq, module: Module) -> None:
    module.write(BROKEN)
    assert forq.ctl("create", "anyway", *module.arguments(), "--no-wait") == "created anyway"
    wait_until(lambda: forq.queue_status("anyway")["state"] == "config_error", what="it is config_error")
    check_traceback(forq.ctl("status", "anyway"), module.file)
    check_traceback(forq.ctl("why", "anyway", forq.ctl("push", "anyway", "1")), module.file)
    module.write(BROKEN.replace("rat", "other"))
    assert forq.run_ctl("create", "anyway", *module.arguments()).returncode == 1, "it cannot be served now either"
    done = forq.run_ctl("restart", "anyway")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].endswith("; nothing serves it now")
    assert "name 'other' is not defined" in forq.queue_status("anyway")["reason"], "the reason is from the last try"
    module.write(GOOD)
    assert forq.ctl("create", "anyway", *module.arguments()) == "joined anyway"
    wait_until(lambda: forq.queue_status("anyway")["done"] == 1, what="what waited has run")


def test_a_new_definition_whose_handler_cannot_be_imported_changes_nothing(module: Module, tmp_path: Path) -> None:
    with running() as forq:
        forq.ctl("create", "defined", *module.arguments())
        old = forq.wait_for_child("defined")["pid"]
        other = Module(tmp_path, f"{module.name}_other")
        other.write(BROKEN)
        done = forq.run_ctl("create", "defined", *other.arguments())
        assert (done.returncode, "queue 'defined' is not changed: handler" in done.stderr) == (1, True)
        check_traceback(done.stderr, other.file)
        serves(forq, "defined", old)
        assert forq.stop() == 0
        forq.start()
        serves(forq, "defined", forq.wait_for_child("defined")["pid"])
        other.write(GOOD)
        assert forq.ctl("create", "defined", *other.arguments()) == "joined defined"
        definition = json.loads((forq.state_dir / "queues" / "defined.json").read_text())
        assert definition["handler"] == f"{other.name}:handle"


@pytest.mark.fault("new code cannot be imported")
def test_an_import_that_takes_too_long_is_killed_with_everything_it_started(forq: Forq, module: Module) -> None:
    forq.ctl("create", "hangs", *module.arguments())
    old = forq.wait_for_child("hangs")["pid"]
    hangs(module)
    done = forq.run_ctl("restart", "hangs", "--wait", "2s")
    assert done.returncode == 1
    assert "its handler is not imported after 2 s (--wait allows more); process " in done.stderr
    assert f'File "{module.file}", line 4 in <module>' in done.stderr
    assert "importlib" not in done.stderr
    started = importing(module)
    assert len(started) == 1, "the retry process imports it with its first job"
    assert not alive(set(started))
    wait_until(lambda: not [p for p in psutil.process_iter() if is_sleep(p, forq)], what="their programs are gone")
    serves(forq, "hangs", old)


def is_sleep(process: psutil.Process, forq: Forq) -> bool:
    """Whether it is the program of a handler of this supervisor."""
    try:
        mine = process.environ().get("FORQ_STATE_DIR") == str(forq.state_dir)
        return mine and process.cmdline()[:1] == ["sleep"] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.mark.fault("new code cannot be imported")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
            "ended with signal 9 (SIGKILL) while importing",
        ),
        ("import os\nos._exit(78)\n", "ended with exit 78 while importing"),
        ("import sys\nsys.exit('no licence')\n", "SystemExit: no licence"),
        ("def handle(data): pass\n", "cannot be called with (data, job): it is handle(data)"),
        ("def run(data, job): pass\n", "has no function handle; it has run"),
        ("def handle(data, job) pass\n", "SyntaxError"),
    ],
)
def test_the_old_process_stays_however_the_import_fails(forq: Forq, module: Module, source: str, message: str) -> None:
    forq.ctl("create", module.name, *module.arguments())
    old = forq.wait_for_child(module.name)["pid"]
    module.write(source)
    done = forq.run_ctl("restart", module.name)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr
    serves(forq, module.name, old)
    forq.ctl("delete", module.name)


def test_the_new_process_runs_jobs_while_the_old_one_finishes_its_own(forq: Forq, tmp_path: Path) -> None:
    forq.create("handed", "wait_for", stop_grace="60s")
    gate, open_gate = tmp_path / "gate", tmp_path / "open"
    open_gate.touch()
    queue = forq.client().queue("handed")
    queue.enqueue(str(gate), id="long")
    old = wait_until(lambda: [t for t in forq.traces("start") if t.job == "long"], what="it runs")[0].pid
    assert forq.ctl("restart", "handed") == "restarted handed"
    new = forq.child("handed")["pid"]
    assert new != old
    queue.enqueue(str(open_gate), id="behind")
    wait_until(lambda: [t for t in forq.traces("end") if t.job == "behind"], what="it does not wait for the long one")
    assert alive({old}) == {old}
    gate.touch()
    wait_until(lambda: forq.queue_status("handed")["done"] == 2, what="both are done")
    assert {t.job: t.pid for t in forq.traces("end") if t.queue == "handed"} == {"long": old, "behind": new}
    wait_until(lambda: not alive({old}), what="the old process has ended")
    assert not [t for t in forq.traces() if t.queue == "handed" and t.stalls]


def test_restarts_requested_meanwhile_share_one_further_import(forq: Forq, module: Module) -> None:
    """Their code may be newer than the code that the first one imported."""
    forq.ctl("create", "thrice", *module.arguments())
    forq.wait_for_child("thrice")
    gate = hangs(module)
    control = ControlClient(str(forq.state_dir / "control.sock"), 60.0)
    asked = {control.send("queue.restart", {"name": "thrice"})}
    wait_until(lambda: importing(module), what="the first imports")
    first = importing(module)
    asked |= {control.send("queue.restart", {"name": "thrice"}) for _ in range(2)}
    assert control.call("ping", {})["pong"], "the supervisor has read the others"
    gate.touch()
    answers = dict(control.receive(time.monotonic() + 60) for _ in asked)
    control.close()
    assert answers == {number: {"name": "thrice"} for number in asked}
    now = forq.wait_for_child("thrice")["pid"]
    assert len(importing(module)) == 2
    assert now == importing(module)[1]
    wait_until(lambda: not alive(set(first)), what="the process of the first restart has ended")


@pytest.mark.fault("new code cannot be imported")
@pytest.mark.parametrize("how", ["shutdown", "delete", "kill"])
def test_ending_the_queue_during_a_restart_ends_the_new_processes_too(module: Module, how: str) -> None:
    with running() as forq:
        forq.ctl("create", "amid", *module.arguments())
        old = forq.wait_for_child("amid")["pid"]
        hangs(module)
        restart = forq.begin_ctl("restart", "amid")
        wait_until(lambda: importing(module), what="the new one imports")
        new = {*importing(module), *pids(forq, "amid")}
        assert len(new) == 4
        if how == "delete":
            forq.ctl("delete", "amid")
        elif how == "shutdown":
            assert forq.stop() == 0
        else:
            os.kill(forq.pid, signal.SIGKILL)
        message = {
            "delete": "deleted in the meantime",
            "shutdown": "is stopping",
            "kill": "cannot reach the supervisor",
        }[how]
        error = restart.communicate(timeout=30)[1]
        assert (restart.returncode, message in error) == ({"delete": 4, "shutdown": 1, "kill": 7}[how], True), error
        wait_until(lambda: not alive({old, *new}), what="all are gone")
        wait_until(lambda: not [p for p in psutil.process_iter() if is_sleep(p, forq)], what="and their programs")


@pytest.mark.parametrize("how", ["shutdown", "kill"])
def test_a_queue_being_created_does_not_exist_after_the_supervisor_ends(module: Module, how: str) -> None:
    with running() as forq:
        hangs(module)
        create = forq.begin_ctl("create", "half", *module.arguments())
        wait_until(lambda: importing(module), what="it imports")
        assert forq.queue_status("half")["state"] == "starting"
        assert "importing" in forq.ctl("status", "half")
        assert f'File "{module.file}", line 4' in forq.ctl("stack", "half")
        if how == "shutdown":
            assert forq.stop() == 0
        else:
            os.kill(forq.pid, signal.SIGKILL)
            assert forq.process is not None
            forq.process.wait()
        assert create.wait(30) in (1, 7)
        wait_until(lambda: not alive(set(importing(module))), what="its processes are gone")
        forq.start()
        assert forq.status()["queues"] == []
        assert "half" not in forq.client().queues()


def test_a_restart_of_a_queue_waiting_for_its_respawn_reports_the_error(forq: Forq, module: Module) -> None:
    dies = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    module.write(dies)
    forq.ctl("create", "flapping", *module.arguments(), "--no-wait")
    wait_until(lambda: forq.queue_status("flapping")["state"] == "flapping", what="it keeps dying")
    module.write(BROKEN)
    done = forq.run_ctl("restart", "flapping")
    assert (done.returncode, "nothing serves it now" in done.stderr) == (1, True), done.stderr
    check_traceback(done.stderr, module.file)
    module.write(GOOD)
    forq.ctl("restart", "flapping")
    serves(forq, "flapping", forq.wait_for_child("flapping")["pid"])


@pytest.mark.parametrize("mended", [True, False])
def test_a_process_that_fails_to_import_older_code_does_not_end_a_restart(
    forq: Forq, module: Module, mended: bool
) -> None:
    queue = f"older-{mended}".lower()
    gate = hangs(module, then=BROKEN)
    forq.ctl("create", queue, *module.arguments(), "--no-wait")
    wait_until(lambda: importing(module), what="the processes import the broken code")
    newer = module.directory / "newer"
    wait = f"import os, time\nwhile not os.path.exists({str(newer)!r}): time.sleep(0.01)\n"
    module.write(wait + (GOOD if mended else "import no_such_module\n"))
    restart = forq.begin_ctl("restart", queue)
    wait_until(lambda: "importing" in forq.child_states(queue).values(), what="the successors import the newer code")
    gate.touch()
    wait_until(lambda: forq.queue_status(queue)["state"] == "config_error", what="the older code cannot be imported")
    newer.touch()
    _, errors = restart.communicate(timeout=60)
    assert (restart.returncode, "no_such_module" in errors) == ((0, False) if mended else (1, True)), errors
    if mended:
        serves(forq, queue, forq.wait_for_child(queue)["pid"])
    else:
        assert "no_such_module" in forq.queue_status(queue)["reason"]


def test_a_queue_of_the_config_file_delays_no_other_and_keeps_its_traceback(module: Module, tmp_path: Path) -> None:
    slow = Module(tmp_path, f"{module.name}_slow")
    gate = hangs(slow)
    module.write(BROKEN)
    paths = json.dumps([str(tmp_path), str(HANDLERS)])
    queues = {"slow": f"{slow.name}:handle", "broken": f"{module.name}:handle", "good": "traced:record"}
    settings = "".join(f'[queues.{name}]\nhandler = "{handler}"\npath = {paths}\n' for name, handler in queues.items())
    with running(settings=settings) as forq:
        serves(forq, "good", forq.wait_for_child("good")["pid"])
        wait_until(lambda: forq.queue_status("broken")["state"] == "config_error", what="it is config_error")
        check_traceback(forq.ctl("status", "broken"), module.file)
        assert forq.queue_status("slow")["state"] == "starting"
        gate.touch()
        serves(forq, "slow", forq.wait_for_child("slow")["pid"])


@pytest.mark.parametrize("wait", [0, -1, "5s", None, 1e9, [], {}])
def test_an_invalid_import_timeout_is_refused(forq: Forq, wait: Any) -> None:
    forq.create("sense")
    for method in ("queue.restart", "queue.create"):
        with pytest.raises(UsageError, match="is not allowed: true, false, or seconds up to 86400"):
            forq.call(method, name="sense", wait=wait)
