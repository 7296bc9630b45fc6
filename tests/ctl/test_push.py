"""forqctl push and recover."""

import json
from pathlib import Path
from typing import Any

import pytest

from forq import errors
from tests.ctl.fake_supervisor import FakeSupervisor, forqctl


def test_push_prints_the_id(fake: FakeSupervisor) -> None:
    fake.answers["push"] = {"id": "01J"}
    args = ["--id", "7", "--identifier", "x y", "--priority", "0", "--token", "t", "--type", "a", "--if-exists", "skip"]
    assert forqctl(fake, "push", "q", *args, '{"a": [1, "ü"]}') == (0, "01J\n", "")
    params = {"id": "7", "identifier": "x y", "priority": 0, "token": "t", "type": "a", "if_exists": "skip"}
    assert fake.calls == [("push", {"name": "q", "data": {"a": [1, "ü"]}, **params})]


def test_push_accepts_a_negative_number_as_data(fake: FakeSupervisor) -> None:
    fake.answers["push"] = {"id": "1"}
    assert forqctl(fake, "push", "q", "-5")[0] == 0
    assert fake.calls == [("push", {"name": "q", "data": -5})]


OWN_OPTIONS = [
    "--job-timeout=5m",
    "--max-retries",
    "1",
    "--backoff",
    "1s,5s,1m",
    "--expires-in",
    "1h",
    "--keep-done=2h",
]
SENT_OPTIONS = {"timeout": 300, "max_retries": 1, "backoff": [1, 5, 60], "expires_in": 3600, "keep_done": 7200}


def test_push_sends_the_options_of_a_job(fake: FakeSupervisor) -> None:
    fake.answers["push"] = {"id": "1"}
    assert forqctl(fake, "push", "q", "1", *OWN_OPTIONS) == (0, "1\n", "")
    assert fake.calls == [("push", {"name": "q", "data": 1, **SENT_OPTIONS})]


def test_a_record_may_have_options_of_its_own(fake: FakeSupervisor, tmp_path: Path) -> None:
    fake.answers["push_many"] = {"ids": ["1", "2"]}
    file = tmp_path / "jobs"
    file.write_text('{"data": 1}\n{"data": 2, "timeout": "9s", "backoff": ["1s"]}\n')
    assert forqctl(fake, "push", "q", "--file", str(file), "--records", *OWN_OPTIONS)[0] == 0
    jobs = [{"data": 1, **SENT_OPTIONS}, {"data": 2, **SENT_OPTIONS, "timeout": "9s", "backoff": ["1s"]}]
    assert fake.calls == [("push_many", {"name": "q", "jobs": jobs})]


def test_push_sends_what_a_job_waits_for(fake: FakeSupervisor, tmp_path: Path) -> None:
    fake.answers |= {"push": {"id": "1"}, "push_many": {"ids": ["1", "2"]}}
    options = ["--after", "a", "--after=b,c", "--when", "ended", "--with-results"]
    sent = {"after": ["a", "b,c"], "when": "ended", "with_results": True}
    assert forqctl(fake, "push", "q", "1", *options) == (0, "1\n", "")
    file = tmp_path / "jobs"
    file.write_text('{"data": 1}\n{"data": 2, "after": "d", "when": "dead"}\n')
    assert forqctl(fake, "push", "q", "--file", str(file), "--records", *options)[0] == 0
    assert fake.calls == [
        ("push", {"name": "q", "data": 1, **sent}),
        ("push_many", {"name": "q", "jobs": [{"data": 1, **sent}, {"data": 2, **sent, "after": "d", "when": "dead"}]}),
    ]


@pytest.mark.parametrize("given", [["--when", "ended"], ["--with-results"]])
def test_push_refuses_a_condition_without_jobs_to_wait_for(fake: FakeSupervisor, given: list[str]) -> None:
    code, _, error = forqctl(fake, "push", "q", "1", *given)
    assert (code, f"{given[0]} needs --after: the jobs to wait for" in error) == (2, True)
    assert fake.calls == []


def test_push_refuses_wrong_delays(fake: FakeSupervisor) -> None:
    code, _, error = forqctl(fake, "push", "q", "1", "--backoff", "1s,soon")
    assert code == 2
    assert "duration 'soon' is not allowed" in error


@pytest.mark.spec("M9")
@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (["--in", "10m"], {"run_in": 600}),
        (["--in", "0.25"], {"run_in": 0.25}),
        (["--at", "2026-12-01T09:00+01:00"], {"run_at": 1796112000}),
        (["--at", "2026-12-01T08:00:00.5Z"], {"run_at": 1796112000.5}),
        (["--at", "1796112000.25"], {"run_at": 1796112000.25}),
        (["--at", "2001-09-09T01:46:40Z"], {"run_at": 1000000000}),
    ],
)
def test_push_sends_the_delay_or_time_of_a_job(fake: FakeSupervisor, given: list[str], sent: dict[str, float]) -> None:
    fake.answers["push"] = {"id": "1"}
    assert forqctl(fake, "push", "q", "1", *given) == (0, "1\n", "")
    assert fake.calls == [("push", {"name": "q", "data": 1, **sent})]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--in", "soon"], "duration 'soon'"),
        (["--in=-5s"], "duration '-5s'"),
        (["--in", "nan"], "duration 'nan'"),
        (["--at", "soon"], "--at 'soon'"),
        (["--at", "2026-12-01T09:00"], "a date with a zone"),
        (["--at", "2026-12-01"], "a date with a zone"),
        (["--at", "2026-13-01T09:00Z"], "a date with a zone"),
        (["--at", "nan"], "--at 'nan'"),
        (["--at", "inf"], "--at 'inf'"),
        (["--at=-1"], "--at '-1'"),
        (["--at", "1969-12-31T23:59Z"], "--at '1969-12-31T23:59Z'"),
        (["--in", "1m", "--at", "2026-12-01T09:00Z"], "cannot be combined"),
    ],
)
def test_push_rejects_an_invalid_time_without_a_request(fake: FakeSupervisor, given: list[str], message: str) -> None:
    code, out, err = forqctl(fake, "push", "q", "1", *given)
    assert (code, out, fake.calls) == (2, "", [])
    assert message in err
    assert err.count("\n") == 1, err


@pytest.mark.parametrize("text", ["{", "NaN", "1e999", '"\\ud800"', ""])
def test_push_rejects_invalid_json_without_a_request(fake: FakeSupervisor, text: str) -> None:
    code, out, err = forqctl(fake, "push", "q", text)
    assert (code, out) == (2, "")
    assert err.startswith("forqctl: not JSON")
    assert fake.calls == []


def numbered(params: dict[str, Any]) -> dict[str, Any]:
    return {"ids": [str(number) for number, _ in enumerate(params["jobs"])]}


def test_push_file_sends_chunks_of_500(fake: FakeSupervisor, tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text("".join(f"{number}\n\n" for number in range(1201)))
    fake.answers["push_many"] = numbered
    args = ["--file", "jobs.jsonl", "--priority", "3", "--if-exists", "skip"]
    assert forqctl(fake, "push", "q", *args, cwd=tmp_path) == (0, "pushed 1201 jobs to q\n", "")
    assert [len(params["jobs"]) for _, params in fake.calls] == [500, 500, 201]
    assert {params["if_exists"] for _, params in fake.calls} == {"skip"}
    jobs = [job for _, params in fake.calls for job in params["jobs"]]
    assert jobs == [{"data": number, "priority": 3} for number in range(1201)]


def test_push_file_keeps_chunks_under_512_kib(fake: FakeSupervisor) -> None:
    fake.answers["push_many"] = numbered
    code, out, _ = forqctl(fake, "--json", "push", "q", "--file", "-", stdin=b'"%s"\n' % (b"x" * 200_000) * 5)
    assert (code, json.loads(out)) == (0, {"pushed": 5, "requests": 3})
    assert [len(params["jobs"]) for _, params in fake.calls] == [2, 2, 1]


def test_push_records_sends_the_fields_of_each_record(fake: FakeSupervisor) -> None:
    fake.answers["push_many"] = numbered
    stdin = b'{"data":1,"id":"a","priority":1}\n{"data":{"data":2}}\n'
    code, _, _ = forqctl(fake, "push", "q", "--file", "-", "--records", stdin=stdin)
    assert code == 0
    assert fake.calls[0][1]["jobs"] == [{"data": 1, "id": "a", "priority": 1}, {"data": {"data": 2}}]


@pytest.mark.parametrize("bad", [b"{", b'{"id":"x"}', b"5", b'{"data":1,"colour":2}'])
def test_an_invalid_record_is_reported_by_line_and_its_chunk_is_not_sent(fake: FakeSupervisor, bad: bytes) -> None:
    fake.answers["push_many"] = numbered
    stdin = b'{"data":1}\n' * 600 + bad + b"\n"
    code, out, err = forqctl(fake, "push", "q", "--file", "-", "--records", stdin=stdin)
    assert (code, out) == (2, "")
    assert err.startswith("forqctl: stdin: line 601: ")
    assert err.endswith("; pushed so far: 500\n")
    assert len(fake.calls) == 1


def test_a_refused_chunk_is_reported_by_its_line_numbers(fake: FakeSupervisor) -> None:
    fake.answers["push_many"] = errors.QueueFull("queue q is full")
    assert forqctl(fake, "push", "q", "--file", "-", stdin=b"1\n2\n") == (
        1,
        "",
        "forqctl: stdin: lines 1 to 2: queue q is full; pushed so far: 0\n",
    )


def log_line(job: str, queue: str = "q", **changes: Any) -> bytes:
    entry = {"queue": queue, "id": job, "identifier": job, "type": None, "priority": 5, "data": 1, "fence": 7}
    return json.dumps({**entry, "error": {"traceback": "x" * 100}, "enqueued_at": 1.5, **changes}).encode() + b"\n"


def known_none(params: dict[str, Any]) -> dict[str, Any]:
    return {"recovered": len(params["jobs"]), "known": 0, "left": []}


def test_recover_pushes_each_job_unchanged_with_its_own_token(fake: FakeSupervisor, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(
        log_line("a", identifier="Ann", type="mail", priority=0, data={"x": None})
        + b"\n"
        + log_line("b")
        + log_line("b", fence=8)
        + log_line("c", fence=None, cause="deleted")
    )
    fake.answers["recover"] = known_none
    summary = "recovered 4, already there 0, skipped 0, broken 0\n"
    assert forqctl(fake, "recover", "log", cwd=tmp_path) == (0, summary, "")
    ((_, params),) = fake.calls
    tokens = [job.pop("token") for job in params["jobs"]]
    assert params["jobs"] == [
        {"id": "a", "data": {"x": None}, "identifier": "Ann", "priority": 0, "type": "mail"},
        {"id": "b", "data": 1, "priority": 5},
        {"id": "b", "data": 1, "priority": 5},
        {"id": "c", "data": 1, "priority": 5},
    ]
    assert params["name"] == "q"
    assert len(set(tokens)) == 4
    assert all(token.startswith("recover:") and len(token) == 40 for token in tokens)
    forqctl(fake, "recover", "log", cwd=tmp_path)
    assert [job["token"] for job in fake.calls[1][1]["jobs"]] == tokens


def test_recover_counts_existing_jobs_and_reports_invalid_lines(fake: FakeSupervisor) -> None:
    fake.answers["recover"] = {"recovered": 1, "known": 1, "left": []}
    bad = [
        b"{\n",
        b'{"queue":"q","id":"x"}\n',
        log_line("a b"),
        log_line("c", priority="high"),
        log_line("d", queue=".."),
    ]
    stdin = log_line("a") + b"".join(bad) + log_line("e", data="x" * 3_000_000) + log_line("f")
    code, out, err = forqctl(fake, "recover", "-", stdin=stdin)
    assert (code, out) == (1, "recovered 1, already there 1, skipped 0, broken 6\n")
    assert [line.split(": ")[2] for line in err.splitlines()] == [f"line {number}" for number in range(2, 8)]
    assert [job["id"] for job in fake.calls[0][1]["jobs"]] == ["a", "f"]


def test_recover_sends_chunks_per_queue_or_all_to_the_given_queue(fake: FakeSupervisor) -> None:
    fake.answers["recover"] = known_none
    stdin = b"".join(log_line(f"a{n}") for n in range(700)) + log_line("b", queue="r")
    assert json.loads(forqctl(fake, "recover", "-", "--json", stdin=stdin)[1]) == {
        "recovered": 701,
        "already_there": 0,
        "left": 0,
        "broken": 0,
        "dry_run": False,
    }
    assert [(params["name"], len(params["jobs"])) for _, params in fake.calls] == [("q", 500), ("q", 200), ("r", 1)]
    fake.calls.clear()
    assert forqctl(fake, "recover", "-", "--queue", "s", stdin=stdin)[0] == 0
    assert {params["name"] for _, params in fake.calls} == {"s"}


def test_recover_dry_run_pushes_nothing_and_needs_no_supervisor() -> None:
    stdin = log_line("a") + b"rubbish\n"
    code, out, err = forqctl(None, "recover", "-", "--dry-run", stdin=stdin)
    assert (code, out) == (1, "would push 1, already there 0, skipped 0, broken 1\n")
    assert "stdin: line 2: not JSON" in err


def test_recover_exits_with_4_for_an_unknown_queue_and_2_for_an_unreadable_file(fake: FakeSupervisor) -> None:
    fake.answers["recover"] = errors.UnknownQueue("no queue 'q'")
    assert forqctl(fake, "recover", "-", stdin=log_line("a")) == (
        4,
        "",
        "forqctl: stdin: line 1: no queue 'q'; recovered so far: 0\n",
    )
    code, _, err = forqctl(fake, "recover", "/no/such/file")
    assert (code, err) == (2, "forqctl: cannot read /no/such/file: No such file or directory\n")


def test_recover_isolates_a_job_that_its_queue_rejects(fake: FakeSupervisor) -> None:
    def push(params: dict[str, Any]) -> Any:
        large = any(len(str(job["data"])) > 10 for job in params["jobs"])
        return errors.InvalidData("larger than max_data") if large else known_none(params)

    fake.answers["recover"] = push
    stdin = log_line("a") + log_line("b", data="x" * 20) + log_line("c")
    code, out, err = forqctl(fake, "recover", "-", stdin=stdin)
    assert (code, out) == (1, "recovered 2, already there 0, skipped 0, broken 1\n")
    assert err == "forqctl: stdin: line 2: larger than max_data\n"


def test_recover_reports_skipped_lines_and_the_next_step(fake: FakeSupervisor) -> None:
    fake.answers["recover"] = {"recovered": 1, "known": 0, "left": [1]}
    code, out, err = forqctl(fake, "recover", "-", stdin=b"\n" + log_line("a") + log_line("a", fence=8))
    assert (code, out) == (1, "recovered 1, already there 0, skipped 1, broken 0\n")
    assert err.splitlines() == [
        "forqctl: stdin: line 3: skipped: job a of queue q is live",
        "forqctl: lines skipped: 1; run the command again when the live jobs with their ids have ended",
    ]
    fake.answers["recover"] = lambda params: {"recovered": 0, "known": 0, "left": [*range(len(params["jobs"]))]}
    code, out, err = forqctl(fake, "recover", "-", stdin=b"".join(log_line(f"j{n}") for n in range(700)))
    assert (code, out) == (1, "recovered 0, already there 0, skipped 700, broken 0\n")
    assert len(err.splitlines()) == 11, "only the first of many are listed"
