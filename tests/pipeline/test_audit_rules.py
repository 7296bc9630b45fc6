"""The audit's tables and the documentation of states have every verb of the journal."""

from pathlib import Path

import pytest

from forq.broker.journal import VERBS
from forq.pipeline import verbs

STATES = Path(__file__).resolve().parents[2] / "docs" / "design" / "states.md"
OF_QUEUES = {"created", "deleted", "paused", "resumed", "batch_opened", "batch_ended"}
OWN_NAMES = {"fail_job_added", "cancelled_run"}


def test_every_verb_of_the_journal_is_in_a_table() -> None:
    known = {*verbs.LIFECYCLE, *verbs.BLOCKING, *verbs.ARCHIVE, *verbs.NOTES} - OWN_NAMES
    assert known == VERBS - OF_QUEUES
    assert set(verbs.AFTER) == set(verbs.LIFECYCLE)
    assert len(verbs.LIFECYCLE) == len(set(verbs.LIFECYCLE))


@pytest.mark.parametrize("verb", sorted(VERBS - OF_QUEUES))
def test_the_documentation_of_states_has_every_verb_of_a_job(verb: str) -> None:
    assert f"`{verb}`" in STATES.read_text()


def test_every_step_either_has_the_fence_of_its_run_or_no_fence() -> None:
    with_own_fence = {"claimed", "revived", "fail_job_added"}
    assert {*verbs.FENCED, *verbs.UNFENCED, *with_own_fence} >= {*verbs.LIFECYCLE, *verbs.BLOCKING}
    assert not set(verbs.FENCED) & set(verbs.UNFENCED)
