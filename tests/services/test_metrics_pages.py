"""When the metrics process looks, and when it looks twice."""

import pytest

from forq.procs.scoreboard import Tallies
from forq.services import metrics
from forq.services.http_server import Asked
from forq.services.metrics import Look, Pages
from tests.support.drive.contexts import context
from tests.support.drive.metrics import look_at, queue_status


class Scripted:
    """Gives the looks of a test, the last one again and again, and counts them."""

    def __init__(self, *looks: Look) -> None:
        self._looks = list(looks)
        self.looked = 0

    def look(self) -> Look:
        self.looked += 1
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    monkeypatch.setattr(metrics, "AGAIN_SECONDS", 0.0)
    return Pages(context(tallies=Tallies(4)))


def ask(pages: Pages, *looks: Look) -> tuple[int, int]:
    """The status of /healthz, and how many looks that took."""
    scripted = Scripted(*looks)
    pages._looker = scripted  # type: ignore[assignment]
    pages._looked_at = 0.0
    return pages.answer(Asked("/healthz", {})).status, scripted.looked


FINE = look_at([queue_status("a"), queue_status("b")])
A_AT_FAULT = look_at([queue_status("a", state="flapping"), queue_status("b")])
B_AT_FAULT = look_at([queue_status("a"), queue_status("b", state="flapping")])


def test_a_fault_that_is_gone_at_the_second_look_is_none(pages: Pages) -> None:
    assert ask(pages, A_AT_FAULT, FINE) == (200, 2)


def test_a_fault_that_stays_is_one_and_is_not_looked_at_twice_again(pages: Pages) -> None:
    assert ask(pages, A_AT_FAULT, A_AT_FAULT) == (503, 2)
    assert ask(pages, A_AT_FAULT) == (503, 1)
    assert ask(pages, FINE) == (200, 1)


def test_a_fault_that_only_the_second_look_shows_does_not_count_yet(pages: Pages) -> None:
    assert ask(pages, A_AT_FAULT, B_AT_FAULT) == (200, 2)
    assert ask(pages, B_AT_FAULT) == (503, 2)


def test_within_a_second_nobody_looks_again(pages: Pages) -> None:
    scripted = Scripted(FINE)
    pages._looker = scripted  # type: ignore[assignment]
    for path in ("/healthz", "/metrics", "/healthz", "/metrics", "/"):
        assert pages.answer(Asked(path, {})).status == 200
    assert scripted.looked == 1
