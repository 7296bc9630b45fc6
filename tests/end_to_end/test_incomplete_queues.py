"""Half-created and half-deleted queues: pulse finds them, and the clerk repairs them for the supervisor."""

import json
import sys
from collections.abc import Iterator

import pytest

from forq.broker.keys import DEFAULT_PREFIX, queue_base, registry_key
from forq.broker.link import Link
from forq.broker.registry import Registry
from forq.broker.scripts import script
from tests.support.drive.supervisor import Forq
from tests.support.drive.wait import wait_until, whole_lines

# More jobs of a deleted queue than the clerk logs in one call.
JOBS = 30_000
IMPATIENT = """
import sys
from forq import cli
from forq.services import pulse
from forq.services import pulse
pulse.ABANDONED_SECONDS, pulse.INCOMPLETE_CHECK_SECONDS = 0.5, 0.02
sys.exit(cli.main())
"""


class ImpatientForq(Forq):
    """Checks for incomplete queues fifty times a second, and repairs one after half a second."""

    def program(self) -> list[str]:
        return [sys.executable, "-c", IMPATIENT]


@pytest.fixture
def forq() -> Iterator[ImpatientForq]:
    forq = ImpatientForq()
    try:
        forq.start()
        yield forq
    finally:
        forq.remove()


@pytest.fixture
def link(forq: ImpatientForq) -> Iterator[Link]:
    link = Link(forq.url)
    yield link
    link.close()


def entry(link: Link, name: str) -> object:
    return link.call("HGET", registry_key(DEFAULT_PREFIX), name)


def repairs(forq: Forq, name: str) -> int:
    lines = (line for line in forq.log.splitlines() if "repairing half-created" in line)
    return sum(line.endswith(f"queue={name}") for line in lines)


def test_an_entry_whose_queue_was_never_created_is_removed(forq: ImpatientForq, link: Link) -> None:
    forq.create("whole")
    link.run(script("reserve"), registry_key(DEFAULT_PREFIX), "half", "on_request", 100)
    wait_until(lambda: entry(link, "half") is None)
    assert repairs(forq, "half") >= 1
    forq.create("half")
    assert entry(link, "whole") == entry(link, "half") == b"work"


@pytest.mark.parametrize("marked", [True, False])
def test_an_abandoned_deletion_is_finished_and_its_dropped_jobs_are_logged(
    forq: ImpatientForq, link: Link, marked: bool
) -> None:
    """The deleter died before the jobs were logged, or even before the entry was marked."""
    queue = forq.client().create_queue("gate", mode="on_request")
    queue.enqueue_many([{"n": number} for number in range(JOBS)])
    base = queue_base(DEFAULT_PREFIX, "gate")
    if marked:
        assert Registry(link, DEFAULT_PREFIX).delete("gate", force=True) == JOBS
    else:
        epoch = link.call("HGET", f"{base}:options", "epoch")
        assert link.run_atomic(script("delete"), [(base, epoch, 1), (f"{base}:fail", "", 1)])[0][1] == JOBS
    wait_until(lambda: entry(link, "gate") is None)
    lines = whole_lines(forq.state_dir / "logs" / "gate" / "failed.jsonl")
    assert sorted(json.loads(line)["data"]["n"] for line in lines) == list(range(JOBS))
    assert link.call("EXISTS", f"{base}:trash", f"{base}:options") == 0
    # Pulse reports it repeatedly meanwhile, and one more report may be in flight at the end.
    assert 1 <= repairs(forq, "gate") <= 2
    assert forq.client().create_queue("gate", mode="on_request").status()["waiting"] == 0
