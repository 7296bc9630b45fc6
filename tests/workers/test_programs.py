"""The programs of exec handlers: their output, their exit, and programs started per job."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forq.errors import ConfigError
from forq.output.programs import BURST_LINES, LINES_PER_SECOND, PIPE_WATCHER
from forq.queue_spec import QueueSpec, read_program
from forq.workers.exec_handlers import ExecHandler, ExecOnceHandler, Program, close_handlers, running_programs
from forq.workers.handlers import Handlers, load_handlers
from forq.workers.minder import ZombieReaper
from forq.workers.recycling import programs_memory_bytes
from tests.support.drive.processes import alive
from tests.support.drive.programs import python_program, shell
from tests.support.drive.wait import wait_until
from tests.workers.exec_attempts import Made, failure_of, job, pid_of

pytestmark = pytest.mark.timeout(60)


def test_stderr_of_a_program_is_logged_with_its_job_and_without_one_between_jobs(
    tmp_path: Path, made: Made, logged: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "gate"
    act = f"""\
os.write(2, "half ü\\x1b[31m\\r\\nno end".encode())
say("job_finished", uuid=payload["uuid"])
while not os.path.exists({str(gate)!r}): time.sleep(0.01)
os.write(2, b"between\\n" + b"y" * 5000 + b"\\nlast\\n")
return False
"""
    handler = made(python_program(tmp_path, act))
    handler(1, job("j1"))
    gate.touch()
    wait_until(lambda: "text=last" in logged.text, what="all output is logged")
    handler(1, job("j2"))
    lines = [record.getMessage() for record in logged.records if "program wrote" in record.getMessage()]
    assert lines[:5] == [
        "program wrote queue=q job=j1 text=half ü\\x1b[31m",
        "program wrote queue=q job=j1 text=no end",
        "program wrote queue=q text=between",
        f"program wrote queue=q text={'y' * 2000}…",
        "program wrote queue=q text=last",
    ]
    assert lines[5] == "program wrote queue=q job=j2 text=half ü\\x1b[31m"


@pytest.mark.parametrize("newline", ["", "\\n"])
def test_a_flood_on_stderr_neither_blocks_the_program_nor_fills_the_log(
    tmp_path: Path, made: Made, logged: pytest.LogCaptureFixture, newline: str
) -> None:
    act = f"for _ in range(3000): os.write(2, b'x' * 99 * 655 + b'{newline}' * 655)\nos.write(2, b'\\nend\\n')\n"
    handler = made(python_program(tmp_path, act))
    began = time.monotonic()
    handler(1, job())
    allowed = BURST_LINES + LINES_PER_SECOND * (time.monotonic() - began)
    # Each line may be followed by one that counts the dropped ones.
    written = [record for record in logged.records if record.getMessage().startswith("program wrote queue=")]
    assert len(written) <= allowed
    assert len(logged.records) <= 2 * len(written) + 1
    assert sum(len(record.getMessage()) for record in logged.records) < 3000 * allowed
    if newline:
        assert "lines_dropped=" in logged.text


def test_programs_are_ended_together_by_eof_then_term_then_kill(tmp_path: Path) -> None:
    deaf = 'signal.signal(signal.SIGTERM, lambda *_: open(payload["data"], "w").close())\ntime.sleep(60)\n'
    act = 'if data is None: return True\nsay("job_finished", uuid=payload["uuid"])\n' + deaf
    line = python_program(tmp_path, act)
    handlers = [ExecHandler(read_program(line), "q") for _ in range(4)]
    marks = [tmp_path / f"term{number}" for number in range(3)]
    handlers[3](None, job())
    for handler, mark in zip(handlers, marks, strict=False):
        handler(str(mark), job())
    pids = {pid_of(handler) for handler in handlers}
    began = time.monotonic()
    close_handlers(handlers)
    assert time.monotonic() - began < 5
    assert all(mark.exists() for mark in marks)
    assert not alive(pids)


def test_a_program_that_kills_its_process_group_kills_only_itself(tmp_path: Path) -> None:
    handler = ExecOnceHandler(read_program(shell(tmp_path, "kill -9 0")))
    assert failure_of(handler)["name"] == "ExitSignal"


def test_the_memory_of_programs_counts_for_recycling(tmp_path: Path, made: Made) -> None:
    handler = made(python_program(tmp_path, "global kept; kept = bytearray(os.urandom(1 << 20) * 30)"))
    handler(1, job())
    assert programs_memory_bytes() > 30 << 20


def test_programs_are_not_reaped_as_leftover_zombies(tmp_path: Path) -> None:
    """An exec-once program that has ended is a zombie until its worker reads its exit status."""
    zombies = ZombieReaper()
    program = Program(read_program(shell(tmp_path, "exit 7")), job())
    wait_until(program.has_ended, what="it has ended")
    for _ in range(3):
        zombies.reap(idle=True)
    assert program.returncode() == 7
    program.discard()


def test_a_stale_exit_event_does_not_prevent_reaping_a_later_program(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    """The event may be for a descriptor that was closed since, and the later program may have its number."""
    program = Program(read_program(shell(tmp_path, "read line", once=False)), job())
    watched = PIPE_WATCHER._callbacks[program._pidfd]
    assert watched(), "it is still watched"
    program.close_stdin()
    wait_until(lambda: program.pid not in running_programs(), what="it is reaped while idle")
    program.discard()
    assert "failed to kill a program" not in logged.text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("exit 0", None),
        ("cat > /dev/null", None),
        ("exit 3", ("ExitStatus", "retriable", "the program exited with status 3")),
        (
            "echo out; echo err >&2; exit 65",
            ("ExitStatus", "permanent", "the program exited with status 65; last output: err"),
        ),
        ("kill -15 $$", ("ExitSignal", "retriable", "the program was killed by signal 15 (SIGTERM)")),
        ("sleep 60 & exit 0", None),
    ],
)
@pytest.mark.parametrize("size", [1, 1_000_000])
def test_the_exit_status_of_an_exec_once_program_is_the_outcome(
    tmp_path: Path, source: str, expected: tuple[str, ...] | None, size: int
) -> None:
    handler = ExecOnceHandler(read_program(shell(tmp_path, source.replace("sleep 60", "sleep 3"))))
    if expected is None:
        handler("x" * size, job())
    else:
        error = failure_of(handler, "x" * size)
        assert (error["name"], error["kind"], error["message"]) == expected
    assert not running_programs()


def test_an_exec_once_program_gets_data_and_environment_and_its_output_is_logged(
    tmp_path: Path, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORQ_REDIS", "unix:///nowhere")
    names = "$FORQ_QUEUE $FORQ_JOB_ID $FORQ_IDENTIFIER $FORQ_TYPE $FORQ_ATTEMPT $FORQ_FENCE $FORQ_REDIS $1"
    line = shell(tmp_path, f'cat; echo "{names}" >&2') + " 'an argument'"
    ExecOnceHandler(read_program(line))({"a": ["ü", 1.5, None]}, job(counts=(1, 0, 0)))
    lines = [record.getMessage() for record in logged.records]
    assert lines == [
        'program wrote queue=q job=j1 text={"a":["ü",1.5,null]}',
        "program wrote queue=q job=j1 text=q j1 mine mail 2 9 unix:///nowhere an argument",
    ]


def test_each_worker_has_its_own_instance_per_type(tmp_path: Path) -> None:
    line = python_program(tmp_path, "note(str(os.getpid()))")
    spec = QueueSpec.from_mapping("q", {"handler": line, "handlers": {"a": line, "py": "os.path:join"}}, "test")
    handlers = load_handlers(spec)
    workers = [handlers.for_worker(), handlers.for_worker()]
    pids = []
    for worker in workers:
        for job_type in (None, "a"):
            handler = worker.for_type(job_type)
            assert isinstance(handler, ExecHandler)
            handler(1, job())
            pids.append(pid_of(handler))
    assert len(set(pids)) == 4
    for worker in workers:
        worker.close()
    assert not alive(set(pids))


def test_python_handlers_are_shared_by_all_workers() -> None:
    handlers = Handlers({None: print})
    assert handlers.for_worker() is handlers
    handlers.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "is not a file"),
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: path.write_text("x"), "is not executable"),
    ],
)
def test_a_program_that_cannot_be_run_is_a_config_error(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path / "program")
    spec = QueueSpec.from_mapping("q", {"handlers": {"t": f"exec:{tmp_path}/program x"}}, "test")
    with pytest.raises(ConfigError, match=message):
        load_handlers(spec)
