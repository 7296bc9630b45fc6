"""When the metrics process takes one snapshot, and when it takes two."""

import pytest

from forq.procs.scoreboard import AttemptStats
from forq.services import metrics
from forq.services.http_server import Request
from forq.services.metrics import Endpoints
from forq.services.snapshot import Snapshot
from tests.support.drive.contexts import context
from tests.support.drive.metrics import make_snapshot, queue_status


class Scripted:
    """Returns the given snapshots, repeats the last one, and counts them."""

    def __init__(self, *snapshots: Snapshot) -> None:
        self._snapshots = list(snapshots)
        self.taken = 0

    def sample(self) -> Snapshot:
        self.taken += 1
        return self._snapshots.pop(0) if len(self._snapshots) > 1 else self._snapshots[0]


@pytest.fixture
def endpoints(monkeypatch: pytest.MonkeyPatch) -> Endpoints:
    monkeypatch.setattr(metrics, "CONFIRM_SECONDS", 0.0)
    return Endpoints(context(stats=AttemptStats(4)))


def get_health(endpoints: Endpoints, *snapshots: Snapshot) -> tuple[int, int]:
    """Returns the status of /healthz and the number of snapshots taken."""
    scripted = Scripted(*snapshots)
    endpoints._sampler = scripted  # type: ignore[assignment]
    endpoints._taken_at = 0.0
    return endpoints.respond(Request("/healthz", {})).status, scripted.taken


FINE = make_snapshot([queue_status("a"), queue_status("b")])
A_AT_FAULT = make_snapshot([queue_status("a", state="flapping"), queue_status("b")])
B_AT_FAULT = make_snapshot([queue_status("a"), queue_status("b", state="flapping")])


def test_a_fault_that_is_gone_in_the_second_snapshot_is_not_reported(endpoints: Endpoints) -> None:
    assert get_health(endpoints, A_AT_FAULT, FINE) == (200, 2)


def test_a_fault_that_stays_is_reported_and_not_confirmed_again(endpoints: Endpoints) -> None:
    assert get_health(endpoints, A_AT_FAULT, A_AT_FAULT) == (503, 2)
    assert get_health(endpoints, A_AT_FAULT) == (503, 1)
    assert get_health(endpoints, FINE) == (200, 1)


def test_a_fault_that_only_the_second_snapshot_shows_is_not_reported_yet(endpoints: Endpoints) -> None:
    assert get_health(endpoints, A_AT_FAULT, B_AT_FAULT) == (200, 2)
    assert get_health(endpoints, B_AT_FAULT) == (503, 2)


def test_a_snapshot_is_reused_for_a_second(endpoints: Endpoints) -> None:
    scripted = Scripted(FINE)
    endpoints._sampler = scripted  # type: ignore[assignment]
    for path in ("/healthz", "/metrics", "/healthz", "/metrics", "/"):
        assert endpoints.respond(Request(path, {})).status == 200
    assert scripted.taken == 1
