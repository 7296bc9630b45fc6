"""Recorded runs of the models leave the same keys and journals on fakeredis as on a server."""

import hashlib

import pytest

from forq.testing.fake_server import FakeServer
from tests.guards.model_runs import read_runs, repeat
from tests.guards.recording import RECORDED
from tests.guards.test_broker_dumps import MACHINES
from tests.support.thorough import sample


@pytest.mark.parametrize("name", MACHINES)
def test_recorded_runs_end_as_on_a_server(fake: FakeServer, name: str) -> None:
    runs = list(zip(read_runs(RECORDED / f"runs_{name}.jsonl"), digests(name), strict=True))
    assert len(runs) > 20
    for run, digest in sample(runs, one_in=6):
        dump = repeat(MACHINES[name], fake, run)  # type: ignore[arg-type]  # a fake is used like a server
        assert hashlib.sha256(dump.encode()).hexdigest() == digest, dump


def digests(name: str) -> list[str]:
    """Digests of the dumps from a server."""
    return [line.split()[1] for line in (RECORDED / f"dumps_{name}.txt").read_text().splitlines()]
