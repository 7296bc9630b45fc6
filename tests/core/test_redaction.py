"""What log_redact leaves out, in forq's own log and in what handlers write."""

import logging

import pytest

from forq.log_format import LogFormat, Redaction
from forq.logging_setup import LineFormatter
from tests.support.drive.supervisor import HANDLERS, running
from tests.support.drive.wait import wait_until


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        ([], "card 4111 1111, token=s3cr3t to bob"),
        ([r"\d{4} \d{4}"], "card [redacted], token=s3cr3t to bob"),
        ([r"token=(\S+)"], "card 4111 1111, token=[redacted] to bob"),
        ([r"(card) (\d+)", "bob"], "[redacted] [redacted] 1111, token=s3cr3t to [redacted]"),
        ([r"((s)3)cr3t|(x)"], "card 4111 1111, token=[redacted]cr3t to bob"),
        ([r"nothing|(never)"], "card 4111 1111, token=s3cr3t to bob"),
    ],
)
def test_what_matches_is_left_out_or_what_its_groups_match(patterns: list[str], told: str) -> None:
    assert Redaction(patterns)("card 4111 1111, token=s3cr3t to bob") == told


def test_messages_of_forq_and_their_tracebacks_are_redacted() -> None:
    failure = ValueError("pw=hunter2")
    record = logging.LogRecord("forq", logging.ERROR, "", 1, "no %s", ("pw=hunter2",), (ValueError, failure, None))
    line = LineFormatter(LogFormat(json=True), Redaction([r"pw=(\w+)"])).format(record)
    assert "hunter2" not in line
    assert line.count("pw=[redacted]") == 2


def test_what_handlers_print_is_redacted_in_the_log_and_in_the_files() -> None:
    with running(settings="log_redact = ['pw=([a-z0-9]+)']\n") as forq:
        forq.ctl("create", "q", "--handler", "printing:repeat", "--path", str(HANDLERS))
        forq.ctl("push", "q", '"my pw=hunter2 is good"')
        wait_until(lambda: "pw=[redacted] is good" in forq.ctl("logs", "q"), what="it is in the files")
        wait_until(lambda: "pw=[redacted] is good" in forq.log, what="it is in the log")
        kept = "".join(path.read_text() for path in (forq.state_dir / "logs" / "q").glob("output*.jsonl"))
        assert "hunter2" not in kept + forq.log
