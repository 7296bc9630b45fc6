"""The census of apps with real processes: whatever the import of a module does, the supervisor gets one answer."""

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forq.app.definitions import definitions_hash
from forq.app_spec import AppSpec
from forq.procs.loop import Loop
from forq.procs.treekill import become_subreaper, descendants_of
from forq.supervisor.census import MAX_LINE_BYTES, Census, CensusResult
from forq.supervisor.child import ChildTable
from forq.workers.census import CensusSettings, run_census
from tests.support.drive.contexts import context
from tests.support.drive.processes import in_a_process_of_its_own

pytestmark = pytest.mark.timeout(120)

APP = """
import forq
app = forq.App("shop")
@app.task(queue="mails", max_retries=5)
def send(to: str) -> None: ...
@app.task(every="5m")
def refresh() -> None: ...
app.queue("mails", concurrency=8, rate="100/1m")
"""
# Finds the descriptor of the report.
PIPE = """
import os
pipe = max(fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")
           and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"))
"""


def take_census(directory: Path, *, seconds: float = 60.0, app: str = "census_shop:app") -> CensusResult:
    """Also checks that no process is left, and that the loop was never blocked."""
    become_subreaper()
    loop, results = Loop(), list[CensusResult]()
    spec = AppSpec(None, app, (str(directory),))
    lock = os.open(directory, os.O_RDONLY)

    def main(app: AppSpec, stack_fd: int) -> Callable[..., int]:
        return partial(run_census, CensusSettings(context(), app, os.getpid(), None, stack_fd))

    children = ChildTable(loop, (), None)
    Census(children, spec, {}, main, lock, results.append, seconds=seconds)
    deadline = time.monotonic() + 90
    longest = 0.0
    while not results and time.monotonic() < deadline:
        loop.tick(0.05)
        began = time.thread_time()
        loop.tick(0)
        longest = max(longest, time.thread_time() - began)
    [result] = results
    assert longest < 0.5
    assert [pid for pid in descendants_of(os.getpid()) if not _is_zombie(pid)] == []
    return result


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def check_census(tmp_path: Path, source: str, check: Callable[[CensusResult], object], **how: Any) -> None:
    (tmp_path / "census_shop.py").write_text(source)

    def run() -> None:
        logging.getLogger("forq").setLevel(logging.CRITICAL)
        # The output of the import.
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
        check(take_census(tmp_path, **how))

    in_a_process_of_its_own(run)


def check_error(tmp_path: Path, source: str, *parts: str, traceback: str | None = None, **how: Any) -> None:
    def check(result: CensusResult) -> None:
        assert result.definitions is None
        assert result.error is not None
        for part in parts:
            assert part in str(result.error), str(result.error)
        assert "\n" not in str(result.error)
        if traceback is not None:
            assert traceback in (result.error.traceback or ""), result.error.traceback

    check_census(tmp_path, source, check, **how)


def check_queues(result: CensusResult) -> None:
    assert result.error is None
    assert result.definitions is not None
    assert [spec.name for spec in result.definitions.queues] == ["mails", "shop"]


def test_the_definitions_become_queues_and_schedules(tmp_path: Path) -> None:
    def check(result: CensusResult) -> None:
        check_queues(result)
        assert result.definitions is not None
        mails, shop = result.definitions.queues
        assert result.definitions.name == "shop"
        assert mails.options == {"concurrency": 8, "rate": "100/1m"}
        assert (mails.handler, mails.app, mails.path) == ("census_shop:app", "census_shop:app", (str(tmp_path),))
        assert mails.definitions_hash == shop.definitions_hash
        assert mails.definitions_hash is not None
        [schedule] = result.definitions.schedules["shop"].values()
        assert schedule["type"] == "refresh"
        assert result.files == {str(tmp_path / "census_shop.py")}

    check_census(tmp_path, APP, check)


def test_the_hash_is_that_of_the_definitions(tmp_path: Path) -> None:
    source = APP + "import json\nopen(__file__ + '.json', 'w').write(json.dumps(app.definitions()))\n"

    def check(result: CensusResult) -> None:
        assert result.definitions is not None
        made = json.loads((tmp_path / "census_shop.py.json").read_text())
        assert {spec.definitions_hash for spec in result.definitions.queues} == {definitions_hash(made)}

    check_census(tmp_path, source, check)


def test_it_inherits_no_other_descriptors(tmp_path: Path) -> None:
    source = APP + (
        "import os\n"
        "kinds = [os.readlink(f'/proc/self/fd/{fd}').partition(':')[0] for fd in os.listdir('/proc/self/fd')\n"
        "         if int(fd) > 2 and os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "open(os.path.join(os.path.dirname(__file__), 'fds'), 'w').write(' '.join(sorted(kinds)))\n"
        "assert os.getsid(0) == os.getpid()\n"
    )

    def check(result: CensusResult) -> None:
        check_queues(result)
        kinds = (tmp_path / "fds").read_text().split()
        # The tree lock (here a directory), the file for stacks and the report; the list of descriptors itself.
        assert kinds.count("socket") == 1
        others = {kind for kind in kinds if kind != "socket" and not kind.startswith(("/memfd", "/proc"))}
        assert others <= {str(tmp_path), str(tmp_path / "census_shop.py")}

    check_census(tmp_path, source, check)


def test_an_exception_is_shown_with_its_traceback(tmp_path: Path) -> None:
    check_error(
        tmp_path,
        "import forq\ndef explode():\n    raise RuntimeError('boom')\nexplode()\n",
        "app 'census_shop:app' cannot be imported: RuntimeError: boom",
        f"{tmp_path}/census_shop.py, line 3",
        traceback=f'File "{tmp_path}/census_shop.py", line 4, in <module>',
    )


def test_a_syntax_error_is_shown_with_its_line(tmp_path: Path) -> None:
    check_error(tmp_path, "import forq\nx = (\n", "SyntaxError", traceback="line 2")


@pytest.mark.parametrize(
    ("app", "reason"),
    [
        ("census_shop:other", "module census_shop has no attribute other"),
        ("census_shop:number", "has no attribute number"),
        ("census_shop:function", "is not an app, but of type function"),
        ("missing:app", "No module named 'missing'"),
    ],
)
def test_other_objects_are_refused(tmp_path: Path, app: str, reason: str) -> None:
    check_error(tmp_path, "number = 1\ndef function(data, job): ...\n", f"app {app!r}", reason, app=app)


def test_a_task_that_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    source = "import forq\napp = forq.App('shop')\n@app.task\ndef f(x: object) -> None: ...\n"
    check_error(tmp_path, source, "app 'census_shop:app' is not valid: InvalidTask", "census_shop.py, line 3")


def test_a_fork_that_returns_reports_nothing(tmp_path: Path) -> None:
    check_census(tmp_path, "import os\nos.fork()\n" + APP, check_queues)


def test_processes_and_daemons_of_the_import_are_killed(tmp_path: Path) -> None:
    daemons = (
        "import os, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork():\n"
        "            os._exit(0)\n"
        "        time.sleep(600)\n"
    )
    check_census(tmp_path, daemons + APP, check_queues)


def test_an_import_that_daemonizes_is_an_error(tmp_path: Path) -> None:
    source = "import os\nif os.fork():\n    os._exit(0)\nos.setsid()\n" + APP
    check_error(tmp_path, source, "app 'census_shop:app' cannot be read: its process ended with exit 0", "daemonize")


@pytest.mark.parametrize(
    ("ending", "reason"),
    [("os._exit(0)", "exit 0"), ("os._exit(78)", "exit 78"), ("os.kill(os.getpid(), 9)", r"signal 9 (SIGKILL)")],
)
def test_an_import_that_ends_its_process_is_an_error(tmp_path: Path, ending: str, reason: str) -> None:
    check_error(tmp_path, f"import os\n{ending}\n" + APP, f"its process ended with {reason} before it reported")


def test_sys_exit_is_an_error_of_the_import(tmp_path: Path) -> None:
    check_error(tmp_path, "import sys\nsys.exit(0)\n" + APP, "cannot be imported: SystemExit: 0")


@pytest.mark.parametrize("then", ["", "import time; time.sleep(600)\n"])
def test_an_import_that_closes_all_descriptors_is_an_error(tmp_path: Path, then: str) -> None:
    source = "import os\nos.closerange(3, 1000)\n" + then + APP
    check_error(tmp_path, source, "app 'census_shop:app' cannot be read: ")


def test_a_hanging_import_is_killed_and_its_place_is_shown(tmp_path: Path) -> None:
    source = "import time\ndef wait():\n    time.sleep(600)\nwait()\n"
    trace = f'File "{tmp_path}/census_shop.py", line 3 in wait'
    check_error(tmp_path, source, "took longer than 1 s; process", traceback=trace, seconds=1.0)


def test_a_hang_that_ignores_all_signals_is_killed_with_its_tree(tmp_path: Path) -> None:
    source = (
        "import os, signal, time\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "for _ in range(2):\n"
        "    os.fork()\n"
        "while True:\n"
        "    try:\n"
        "        time.sleep(600)\n"
        "    except BaseException:\n"
        "        pass\n"
    )
    check_error(tmp_path, source, "its import took longer than 0.5 s", seconds=0.5)


def test_a_stopped_process_is_killed(tmp_path: Path) -> None:
    source = f"import os\nos.kill(os.getpid(), {int(signal.SIGSTOP)})\n"
    check_error(tmp_path, source, "its import took longer than 0.5 s", seconds=0.5)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("b'garbage'", "invalid report of its process: "),
        ("b'null'", "not a JSON object"),
        ("b'[1]'", "not a JSON object"),
        ("b'{}'", "`files` is not a list of paths"),
        ("""b'{"files": [1]}'""", "`files` is not a list of paths"),
        ("""b'{"files": [], "more": 1}'""", "unknown key 'more'"),
        ("""b'{"files": [], "error": 1}'""", "must be text"),
        ("""b'{"files": []}'""", "app 'census_shop:app': definitions = None is not allowed"),
    ],
)
def test_a_forged_report_is_one_sentence(tmp_path: Path, line: str, reason: str) -> None:
    check_error(tmp_path, PIPE + f"os.write(pipe, {line} + b'\\n')\n" + APP, "app 'census_shop:app'", reason)


def test_a_report_that_is_too_long_is_refused(tmp_path: Path) -> None:
    source = PIPE + f"import socket\nsocket.socket(fileno=pipe).sendall(b'x' * {MAX_LINE_BYTES + 70_000})\n"
    check_error(tmp_path, source, f"its import wrote more than {MAX_LINE_BYTES} bytes to a descriptor of forq")


def test_definitions_that_are_too_long_are_refused(tmp_path: Path) -> None:
    source = APP + (
        "class Long(forq.App):\n"
        "    def definitions(self):\n"
        f"        return {{'tasks': {{}}, 'app': 'x' * {MAX_LINE_BYTES}}}\n"
        "app = Long('shop')\n"
    )
    check_error(tmp_path, source, f"but at most {MAX_LINE_BYTES} are allowed")


def test_many_schedules_do_not_block_the_loop(tmp_path: Path) -> None:
    """Each search for the 29th of February takes milliseconds."""
    source = APP + (
        "for number in range(900):\n"
        "    app.schedule(f's{number}', refresh.prepare(), cron=f'{number % 60} {number // 60} 29 2 *')\n"
    )

    def check(result: CensusResult) -> None:
        assert result.definitions is not None, result.error
        assert len(result.definitions.schedules["shop"]) == 901

    check_census(tmp_path, source, check)
