"""Runs the session of docs/reference/bridge.md and compares every response."""

import pytest

from forq.bridge.messages import TOPICS
from tests.bridge import transcript
from tests.support.drive.bridge import bridge
from tests.support.drive.wait import wait_until

SESSION = transcript.read(transcript.PAGE.read_text())


@pytest.mark.spec("P1", "P8")
def test_the_documented_session_runs_as_written(redis_url: str) -> None:
    with bridge(redis_url) as process:
        for line, answers in SESSION:
            before = len(process.received)
            process.write(line.encode() + b"\n")
            count = before + len(answers)
            wait_until(lambda: len(process.received) >= count, what=f"answers to {line}")  # noqa: B023
            assert [transcript.shown(*message) for message in process.received[before:]] == answers
        assert process.end() == 0
        # There are no other responses.
        assert len(process.received) == sum(len(answers) for _, answers in SESSION)
        for envelope in process.envelopes:
            sender = ("topic", "service_name", "service_uuid", "service_host", "created_at", "payload")
            assert tuple(envelope) == sender
        refusals = sum(answer.startswith(("error", "job_refused")) for _, answers in SESSION for answer in answers)
        assert sum(" refused " in line for line in process.log) == refusals


def test_the_documented_session_has_every_topic() -> None:
    sent = "\n".join(line for line, _ in SESSION)
    assert [topic for topic in TOPICS if f'"{topic}"' not in sent] == []
    topics = {answer.split(" ")[0] for _, answers in SESSION for answer in answers}
    assert topics == {
        *("job_added", "job_assignment", "job_refused", "job_deleted", "error"),
        *("jobs", "workers", "dispatched", "progress"),
    }
