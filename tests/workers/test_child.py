"""Resource limits that a queue's process applies to itself: its OOM score."""

import ctypes
import os
from pathlib import Path

import pytest

from forq.supervisor.child import spawn
from forq.workers import child
from forq.workers.child import OOM_SCORE, apply_resource_limits

PR_SET_DUMPABLE = 4


def own_score() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


@pytest.mark.parametrize(("before", "after"), [("-500\n", OOM_SCORE), ("0\n", OOM_SCORE), ("900\n", 900)])
def test_a_queue_process_raises_its_oom_score_and_never_lowers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: int
) -> None:
    file = tmp_path / "oom_score_adj"
    file.write_text(before)
    monkeypatch.setattr(child, "OOM_FILE", file)
    apply_resource_limits({})
    assert int(file.read_text()) == after


@pytest.mark.parametrize("content", [None, "", "rubbish"])
def test_the_process_starts_even_if_the_oom_score_cannot_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "oom_score_adj"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(child, "OOM_FILE", file)
    apply_resource_limits({})


def test_raising_the_oom_score_does_not_need_root() -> None:
    def become_nobody() -> int:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
            # After setuid, /proc/self belongs to root until the next exec.
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        apply_resource_limits({})
        return own_score() != OOM_SCORE

    if own_score() > OOM_SCORE:
        pytest.skip("these tests have a higher score already")
    child = spawn(become_nobody, loop=None, keep_fds=(), title="forq: test")
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 0
    child.close()
