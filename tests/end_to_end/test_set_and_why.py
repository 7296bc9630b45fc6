"""Live options, and one sentence about why a job is not running."""

import json
from collections.abc import Iterator

import pytest

from tests.support.running import HANDLERS, Forq, running, wait_until


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


@pytest.mark.spec("Q9", "N9")
def test_a_changed_option_applies_to_the_next_claim_and_after_a_restart() -> None:
    with running() as forq:
        forq.create("live", "fail", max_retries=10, min_backoff="50ms", max_backoff="50ms")
        job_id = forq.ctl("push", "live", "1")
        wait_until(lambda: json.loads(forq.ctl("job", "live", job_id, "--json"))["retry_count"] >= 1)
        pid = forq.child("live")["pid"]
        assert "set max_retries=0 of live" in forq.ctl("set", "live", "max_retries=0")
        wait_until(lambda: forq.queue_status("live")["dead"] == 1)
        assert forq.child("live")["pid"] == pid
        definition = json.loads((forq.state_dir / "queues" / "live.json").read_text())
        assert definition["options"]["max_retries"] == 0
        forq.stop()
        forq.start()
        forq.ctl("push", "live", "2")
        wait_until(lambda: forq.queue_status("live")["dead"] == 2)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere", "max_retries=1"], 4, "no queue"),
        (["here", "max_retry=1"], 2, "max_retries"),
        (["here", "max_retries=many"], 2, "max_retries"),
        (["here", "concurrency=3"], 2, "new process"),
        (["here", "rubbish"], 2, "OPTION=VALUE"),
    ],
)
def test_what_cannot_be_set_is_refused(forq: Forq, arguments: list[str], code: int, says: str) -> None:
    forq.create("here", "noop")
    done = forq.run_ctl("set", *arguments)
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr


def test_why_tells_each_state_apart(forq: Forq) -> None:
    forq.create("asked", "sleep", max_retries=1, min_backoff="100s", max_backoff="100s")
    running_id = forq.ctl("push", "asked", "30")
    wait_until(lambda: forq.queue_status("asked")["active"] == 1)
    assert "running now" in forq.ctl("why", "asked", running_id)
    first, second = forq.ctl("push", "asked", "0"), forq.ctl("push", "asked", "0")
    assert "it is the next one" in forq.ctl("why", "asked", first)
    assert "1 job comes before it" in forq.ctl("why", "asked", second)
    later = forq.ctl("push", "asked", "0", "--in", "1h")
    assert "waits for its time" in forq.ctl("why", "asked", later)
    forq.ctl("pause", "asked")
    assert "paused" in forq.ctl("why", "asked", second)
    assert forq.run_ctl("why", "asked", "nothing").returncode == 4
    forq.create("ending", "fail", max_retries=0)
    dead = forq.ctl("push", "ending", "1")
    wait_until(lambda: forq.queue_status("ending")["dead"] == 1)
    assert "ValueError: no good: 1" in forq.ctl("why", "ending", dead)
    forq.ctl("create", "cannot", "--handler", "not_there:f", "--path", str(HANDLERS))
    wait_until(lambda: forq.queue_status("cannot")["state"] == "config_error")
    waiting = forq.ctl("push", "cannot", "1")
    assert "not_there" in forq.ctl("why", "cannot", waiting)
    forq.ctl("delete", "asked", "--force")
