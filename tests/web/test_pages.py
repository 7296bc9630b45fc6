"""The pages over a real Redis, without a supervisor: what each shows and hides, and what broken requests get."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import orjson
import pytest
from starlette.requests import HTTPConnection
from starlette.testclient import TestClient

import forq.web
from forq.broker.flows import FlowJob, store_flow
from forq.client import Client, new_job
from forq.services.redis_verbs import RedisVerbs
from forq.web.feed import Feed, QueueView, View
from forq.web.names import KINDS, Level

HTML = {"Accept": "text/html"}
SAME_SITE = {"Sec-Fetch-Site": "same-origin", "Accept": "text/html"}
MARKUP = "<img src=x onerror=alert(1)>\"'{{7*7}}"

Authorize = Callable[[HTTPConnection, str], Level]


def dashboard(url: str, authorize: Authorize = lambda request, name: "act", **how: Any) -> TestClient:
    return TestClient(forq.web.asgi(Client(url), authorize=authorize, **how), headers=HTML, follow_redirects=False)


@pytest.fixture
def client(redis_url: str) -> Client:
    client = Client(redis_url)
    queue = client.create_queue("mails")
    queue.enqueue({"password": "hunter2"}, id="first", identifier=MARKUP)
    queue.enqueue({}, id="later", run_in=3600)
    queue.enqueue({}, id="held", after=["first", "later"], identifier=MARKUP)
    return client


@pytest.fixture
def together(client: Client) -> Client:
    """Queues with a batch and a flow."""
    client.create_queue("others")
    with client.batch("mails", id="import-7", on_end=new_job({})) as batch:
        batch.enqueue("others", {}, id="member")
        batch.enqueue("others", {}, id="second")
    parts = [FlowJob("others", new_job({}, id="fetch"), label=MARKUP)]
    parts.append(FlowJob("mails", new_job({}, id="parse"), (0,), "ended", label="parse"))
    store_flow(client.link(), client.prefix, "release-7", parts)
    return client


@pytest.fixture
def page(client: Client, redis_url: str) -> Iterator[TestClient]:
    with dashboard(redis_url) as page:
        yield page


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/",
            "/dead",
            "/schedules",
            "/processes",
            "/find",
            "/find?id=first",
            "/queues/mails",
            "/queues/mails/options",
        ),
        *(
            f"/queues/mails/jobs?state={state}"
            for state in ("waiting", "active", "scheduled", "retry", "blocked", "held")
        ),
        *("/queues/mails/jobs?state=dead", "/queues/mails/jobs?state=done", "/queues/mails/dead"),
        *("/queues/mails/job?id=first", "/queues/mails/job?id=later", "/queues/mails/job?id=never"),
        "/queues/mails/job?id=held",
    ],
)
def test_every_page_is_whole_and_escaped(page: TestClient, path: str) -> None:
    answer = page.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.text.rstrip().endswith("</html>")
    assert "<img src=x" not in answer.text
    assert "hunter2" not in answer.text
    tags = re.findall(r"<[a-z][^>]*>", answer.text)
    assert not [tag for tag in tags if re.search(r"\s(style|on[a-z]+)=|^<script>", tag)], "the policy forbids it"


@pytest.mark.parametrize(
    "path",
    [
        *("/find?id=release-7", "/queues/mails/flow?id=release-7", "/queues/mails/batch?id=import-7"),
        *("/queues/others/job?id=member", "/queues/mails/job?id=import-7:on_end", "/queues/mails/job?id=parse"),
    ],
)
def test_every_page_about_jobs_that_belong_together_is_whole_and_escaped(
    page: TestClient, together: Client, path: str
) -> None:
    test_every_page_is_whole_and_escaped(page, path)


def test_data_is_shown_on_demand_only(page: TestClient) -> None:
    assert "hunter2" in page.get("/queues/mails/job?id=first&show=data").text


def test_a_held_job_links_to_what_it_waits_for_and_back(page: TestClient) -> None:
    text = page.get("/queues/mails/job?id=held").text
    assert "Waits for <small>2 jobs, until all are done" in text
    for id, state in (("first", "waiting"), ("later", "scheduled")):
        assert re.search(rf'href="/queues/mails/job\?id={id}">{id}</a> <span class="state \w+">{state}</span>', text)
    assert "it waits for jobs first and later to be done: first is waiting, later is scheduled for 20" in text
    text = page.get("/queues/mails/job?id=first").text
    assert "Jobs that wait for it" in text
    assert 'href="/queues/mails/job?id=held">held</a>' in text


def test_held_jobs_are_counted_listed_and_cancelled(page: TestClient, client: Client) -> None:
    assert "<dt>Held</dt><dd>1</dd>" in page.get("/").text
    assert re.search(r'state=held">Held</a></dt>\s*<dd class="">1</dd>', page.get("/queues/mails").text)
    text = page.get("/queues/mails/jobs?state=held").text
    assert '<th scope="col" class="n">Waits for</th>' in text
    assert re.search(r'value="held".*?<td class="n">2</td>', text, re.DOTALL)
    assert "No held job matches" in page.get("/queues/mails/jobs?state=held&type=none").text
    form = {"queue": "mails", "state": "held", "which": "matching", "filter.id": "held", "confirmed": "yes"}
    assert page.post("/do/job.cancel", data=form, headers=SAME_SITE).status_code == 303
    assert client.queue("mails").status()["held"] == 0


def test_a_flow_is_found_and_shows_its_jobs(page: TestClient, together: Client) -> None:
    assert 'href="/queues/others/flow?id=release-7">release-7</a>' in page.get("/find?id=release-7").text
    text = page.get("/queues/others/flow?id=release-7").text
    assert "Flow of 2 jobs: 1 <span" in text
    rows = re.findall(r"<tr data-key.*?</tr>", text, re.DOTALL)
    assert 'href="/queues/others/job?id=fetch"' in rows[0]
    assert "<td>\u2003parse</td>" in rows[1]
    assert re.search(r'href="/queues/others/job\?id=fetch">fetch</a> +\(ended\)', rows[1])
    assert ">held</span>" in rows[1]
    text = page.get("/queues/mails/job?id=parse").text
    assert re.search(r'href="/queues/others/job\?id=fetch">fetch</a> +of queue <a href="/queues/others">', text)
    assert "it waits for job fetch of queue others to end" in text


def test_a_batch_is_linked_shown_and_cancelled_after_a_question(page: TestClient, together: Client) -> None:
    assert 'href="/queues/mails/batch?id=import-7">import-7</a>' in page.get("/queues/others/job?id=member").text
    text = page.get("/queues/mails/job?id=import-7:on_end").text
    assert text.count('href="/queues/mails/batch?id=import-7">import-7</a>') == 2
    text = page.get("/queues/mails/batch?id=import-7").text
    assert "<dt>Members</dt><dd>2</dd>" in text
    assert "0 %" in text
    form = {"queue": "mails", "id": "import-7", "back": "/queues/mails/batch?id=import-7"}
    asked = page.post("/do/batch.cancel", data=form, headers=SAME_SITE)
    assert "Cancel batch import-7 of queue mails?" in asked.text
    assert together.find_batch("mails", "import-7").info()["state"] == "sealed"
    done = page.post("/do/batch.cancel", data={**form, "confirmed": "yes"}, headers=SAME_SITE)
    assert "cancelled 2 jobs of batch import-7" in page.get(done.headers["location"]).text
    assert together.find_batch("mails", "import-7").info()["state"] == "cancelled"
    assert together.queue("others").status()["waiting"] == 1


def test_a_large_batch_is_cancelled_in_parts(
    page: TestClient, together: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forq.batch.CANCELLED_PER_CALL", 1)
    form = {"queue": "mails", "id": "import-7", "confirmed": "yes"}
    part = page.post("/do/batch.cancel", data=form, headers=SAME_SITE)
    assert "cancelled 1 job of batch import-7" in part.text
    assert 'name="so_far" value="1"' in part.text
    done = page.post("/do/batch.cancel", data={**form, "so_far": "1"}, headers=SAME_SITE)
    assert "cancelled 2 jobs of batch import-7" in page.get(done.headers["location"]).text
    assert together.queue("others").status()["waiting"] == 1


def test_what_is_unknown_of_flows_and_batches_is_not_found(page: TestClient, together: Client) -> None:
    for path in ("flow?id=release-8", "batch?id=import-8"):
        assert page.get(f"/queues/mails/{path}").status_code == 404
    for path in ("flow", "batch", "flow?id=not+allowed", "batch?id=not+allowed"):
        assert page.get(f"/queues/mails/{path}").status_code == 400
    assert "No queue has a job" in page.get(f"/find?id={'a' * 65}").text


def test_a_reader_sees_flows_and_batches_without_actions(together: Client, redis_url: str) -> None:
    with dashboard(redis_url, lambda request, name: "read") as page:
        assert "parse" in page.get("/queues/others/flow?id=release-7").text
        text = page.get("/queues/mails/batch?id=import-7").text
        assert "<dt>Members</dt><dd>2</dd>" in text
        assert "/do/batch.cancel" not in text
    hidden = {"flow", "batch", "batch.cancel"}
    with dashboard(redis_url, lambda request, name: "forbidden" if name in hidden else "act") as page:
        assert page.get("/queues/others/flow?id=release-7").status_code == 403
        assert page.get("/queues/mails/batch?id=import-7").status_code == 403
        assert "/batch?id=" not in page.get("/queues/others/job?id=member").text
        assert "release-7</a>" not in page.get("/find?id=release-7").text


def test_a_reader_sees_what_a_job_waits_for(client: Client, redis_url: str) -> None:
    allowed = {"overview", "queue", "jobs", "job", "processes"}
    with dashboard(redis_url, lambda request, name: "read" if name in allowed else "forbidden") as page:
        assert "Waits for <small>2 jobs" in page.get("/queues/mails/job?id=held").text
        assert "Waits for</th>" in page.get("/queues/mails/jobs?state=held").text


def test_a_reader_sees_jobs_without_data_and_without_actions(client: Client, redis_url: str) -> None:
    allowed = {"overview", "queue", "jobs", "job", "processes"}

    def read_only(request: HTTPConnection, name: str) -> Level:
        return "read" if name in allowed else "forbidden"

    with dashboard(redis_url, read_only) as page:
        text = page.get("/queues/mails/job?id=first").text
        assert "Show data" not in text
        assert '<form class="inline"' not in text
        assert page.get("/queues/mails/job?id=first&show=data").status_code == 403
        assert page.get("/dead").status_code == 403
        assert page.get("/queues/mails/jobs?state=dead").status_code == 403
        assert page.get("/schedules").status_code == 403
        assert page.get("/queues/mails/options").status_code == 403
        refused = page.post("/do/queue.pause", data={"queue": "mails"}, headers=SAME_SITE)
        assert refused.status_code == 403
        assert not client.queue("mails").status()["paused"]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "action"])
def test_a_read_only_dashboard_refuses_every_action(client: Client, redis_url: str, name: str) -> None:
    with dashboard(redis_url, read_only=True) as page:
        answer = page.post(f"/do/{name}", data={"queue": "mails", "id": "first", "key": "k"}, headers=SAME_SITE)
        assert answer.status_code == 403
    assert client.queue("mails").status()["waiting"] == 1


def test_an_action_returns_to_its_page_with_a_note_that_is_shown_once(page: TestClient, client: Client) -> None:
    answer = page.post("/do/queue.pause", data={"queue": "mails", "back": "/queues/mails"}, headers=SAME_SITE)
    assert answer.status_code == 303
    target = answer.headers["location"]
    assert target.startswith("/queues/mails?note=")
    assert client.queue("mails").status()["paused"]
    assert "paused queue mails" in page.get(target).text
    assert "paused queue mails" not in page.get(target).text


def test_a_link_cannot_make_up_a_note(page: TestClient) -> None:
    assert "you have won" not in page.get("/?note=you have won").text


def test_a_request_of_another_site_changes_nothing(page: TestClient, client: Client) -> None:
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}, {"Origin": "null"}, {}):
        answer = page.post("/do/queue.pause", data={"queue": "mails"}, headers=headers)
        assert answer.status_code == 403, headers
    assert not client.queue("mails").status()["paused"]


def test_an_action_that_needs_a_supervisor_is_not_offered_without_one(page: TestClient) -> None:
    shown = page.get("/queues/mails").text
    assert "/do/queue.pause" in shown
    assert "/do/queue.drain" not in shown


def test_discarding_asks_first(page: TestClient, client: Client) -> None:
    form = {"queue": "mails", "id": "first", "back": "/queues/mails"}
    asked = page.post("/do/job.discard", data=form, headers=SAME_SITE)
    assert asked.status_code == 200
    assert "Discard 1 job of queue mails?" in asked.text
    done = page.post("/do/job.discard", data={**form, "confirmed": "yes"}, headers=SAME_SITE)
    assert done.status_code == 303
    assert "discarded 0 jobs; 1 job not" in page.get(done.headers["location"]).text


def test_selected_jobs_are_cancelled(page: TestClient, client: Client) -> None:
    form = {"queue": "mails", "id": ["first", "gone"], "which": "selected"}
    done = page.post("/do/job.cancel", data=form, headers=SAME_SITE)
    assert "cancelled 1 job; 1 job not" in page.get(done.headers["location"]).text
    assert client.queue("mails").status()["waiting"] == 0


def test_all_matching_jobs_are_counted_before_they_are_cancelled(page: TestClient, client: Client) -> None:
    client.queue("mails").enqueue_many([{}] * 20)
    form = {"queue": "mails", "state": "waiting", "which": "matching", "filter.until": "4e9"}
    asked = page.post("/do/job.cancel", data=form, headers=SAME_SITE)
    assert "Cancel 21 jobs of queue mails?" in asked.text
    done = page.post("/do/job.cancel", data={**form, "confirmed": "yes"}, headers=SAME_SITE)
    assert "cancelled 21 jobs" in page.get(done.headers["location"]).text
    assert client.queue("mails").status()["waiting"] == 0


def test_very_many_matching_jobs_are_cancelled_in_parts(page: TestClient, client: Client) -> None:
    queue = client.queue("mails")
    queue.enqueue_many([{}] * 12_000)
    form = {"queue": "mails", "state": "waiting", "which": "matching", "back": "/queues/mails"}
    assert "Cancel 12,001 jobs of queue mails?" in page.post("/do/job.cancel", data=form, headers=SAME_SITE).text
    part = page.post("/do/job.cancel", data={**form, "confirmed": "yes"}, headers=SAME_SITE)
    cancelled = 12_001 - queue.status()["waiting"]
    # A step of the scan may return some more.
    assert 0 < cancelled <= 11_000
    assert f"cancelled {cancelled:,} jobs of queue mails" in part.text
    (again,) = fields_of(part.text, "job.cancel")
    done = page.post("/do/job.cancel", data=again, headers=SAME_SITE)
    assert "cancelled 12,001 jobs of queue mails" in page.get(done.headers["location"]).text
    assert queue.status()["waiting"] == 0


def test_changed_options_are_set_and_others_left_alone(page: TestClient, client: Client) -> None:
    form = {"queue": "mails", "option.rate": "5/1s", "before.rate": "off", "option.size": "7", "before.size": "7"}
    assert page.post("/do/queue.set", data=form, headers=SAME_SITE).status_code == 303
    limits = client.queue("mails").status()["limits"]
    assert limits is not None
    assert limits["rate"] == "5/1s"
    shown = page.get("/queues/mails/options").text
    assert 'name="option.rate" value="5/1s"' in shown


def test_an_option_that_another_user_has_changed_is_left_alone(page: TestClient) -> None:
    before = dict(re.findall(r'name="before\.(\w+)" value="([^"]*)"', page.get("/queues/mails/options").text))

    def save(name: str, value: str, shown: str) -> tuple[int, str]:
        form = {"queue": "mails", f"option.{name}": value, f"before.{name}": shown}
        answer = page.post("/do/queue.set", data=form, headers=SAME_SITE)
        return answer.status_code, answer.text

    assert save("max_retries", "3", before["max_retries"])[0] == 303
    status, text = save("max_retries", "7", before["max_retries"])
    assert status == 400
    assert "max_retries was changed meanwhile, from 10 to 3" in text
    assert save("max_retries", "3", before["max_retries"])[0] == 303, "both want the same"
    for name, value in before.items():
        if name != "max_retries":
            assert save(name, value, f"{value} ")[0] == 303, "each option is read as it was shown"


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/nothing", 404, "no such page"),
        ("/queues/none", 404, "no queue"),
        ("/queues/a b", 400, "not allowed"),
        ("/queues/mails/jobs?state=odd", 400, "not allowed"),
        ("/queues/mails/jobs?state=waiting&after=odd", 400, "not allowed"),
        ("/queues/mails/jobs?state=waiting&since=yesterday", 400, "such as 2026-11-18T09:30"),
        ("/queues/mails/job", 400, "parameter id is missing"),
        ("/queues/mails/job?id=a b", 400, "not allowed"),
        ("/?order=odd", 400, "not allowed"),
        ("/queues/mails/schedule?key=none", 404, "none"),
        ("/static/../app.py", 404, ""),
        ("/static/%2e%2e/app.py", 404, ""),
    ],
)
def test_broken_addresses_get_a_page_that_says_why(page: TestClient, path: str, status: int, says: str) -> None:
    answer = page.get(path)
    assert answer.status_code == status
    assert says.lower() in answer.text.lower()


def test_a_stale_form_says_what_is_wrong(page: TestClient, client: Client) -> None:
    client.delete_queue("mails", force=True)
    answer = page.post("/do/queue.pause", data={"queue": "mails"}, headers=SAME_SITE)
    assert answer.status_code == 404
    assert "mails" in answer.text


def test_an_unknown_action_names_the_known_ones(page: TestClient) -> None:
    answer = page.post("/do/queue.explode", data={"queue": "mails"}, headers=SAME_SITE)
    assert answer.status_code == 400
    assert "queue.pause" in answer.text


def test_without_redis_the_pages_say_so(tmp_path: Any) -> None:
    with dashboard(f"unix://{tmp_path}/none.sock") as page:
        assert "Redis does not answer" in page.get("/").text
        answer = page.get("/queues/mails")
        assert answer.status_code == 503
        assert "while Redis does not answer" in answer.text
        assert page.get("/schedules").status_code == 503


def test_a_hundred_thousand_schedules_are_paged(page: TestClient, client: Client) -> None:
    client.queue("mails").schedule("k", every=3600)
    link, stored = client.link(), "forq:queue:{mails}:schedules"
    definition = link.call("HGET", stored, "k")
    for at in range(1, 100_000, 1000):
        fields = (part for number in range(at, min(at + 1000, 100_000)) for part in (f"k{number:05}", definition))
        link.call("HSET", stored, *fields)
    first = page.get("/schedules").text
    assert "1\N{EN DASH}200 of 100,000" in first
    assert len(first) < 400_000
    assert "99,801\N{EN DASH}100,000 of 100,000" in page.get("/schedules?page=499").text
    assert "k00042" in page.get("/schedules?find=k00042").text
    shown = page.get("/queues/mails").text
    assert "and 99,900 more" in shown
    assert len(shown) < 200_000


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        (b"broken", "broken schedule definition"),
        (b'{"cron":"0 0 * * *","zone":"Far/Away"}\n{"catch_up":"one"}\n1', "Far/Away"),
        (b'{"every_ms":1000}\n{"catch_up":"one"}\nnot json', "broken schedule definition"),
        (b'{"every_ms":1000}\n{"catch_up":"one","jitter_ms":"x"}\n1', "broken schedule definition"),
    ],
)
def test_a_schedule_that_cannot_be_read_says_why(
    page: TestClient, client: Client, definition: bytes, says: str
) -> None:
    client.link().call("HSET", "forq:queue:{mails}:schedules", "nightly", definition)
    for path in ("/schedules", "/queues/mails", "/queues/mails/schedule?key=nightly"):
        answer = page.get(path)
        assert answer.status_code == 200, path
        assert says in answer.text, path


def test_large_data_is_cut(page: TestClient, client: Client) -> None:
    client.create_queue("large", max_data="16mb").enqueue({"text": "x" * (10 << 20)}, id="big")
    answer = page.get("/queues/large/job?id=big&show=data")
    assert answer.status_code == 200
    assert len(answer.text) < 400_000
    assert "is not shown" in answer.text


def kill_some(client: Client, queue: str, errors: list[tuple[str, str]]) -> None:
    """Puts dead jobs into Redis: one per error, given as name and message. Their ids are d0, d1 …"""
    link, base = client.link(), f"forq:queue:{{{queue}}}"
    for number, (name, message) in enumerate(errors):
        client.queue(queue).enqueue({}, id=f"d{number}")
        record = link.call("HGET", f"{base}:jobs", f"d{number}")
        client.queue(queue).cancel(f"d{number}")
        error = orjson.dumps({"name": name, "message": message, "kind": "retriable"})
        link.call("HSET", f"{base}:dead:jobs", f"d{number}@{number}", record + b"\n" + error)
        link.call("ZADD", f"{base}:dead", 1_700_000_000_000 + number, f"d{number}@{number}")


def fields_of(text: str, action: str) -> list[dict[str, str]]:
    """The hidden fields of the forms of an action."""
    forms = re.findall(rf'<form [^>]*action="/do/{re.escape(action)}".*?</form>', text, re.DOTALL)
    pairs = [re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', form) for form in forms]
    return [dict(each) for each in pairs]


def test_a_group_of_dead_jobs_is_discarded_and_no_other(page: TestClient, client: Client) -> None:
    kill_some(
        client, "mails", [("ValueError", "bad 1"), ("ValueError", "disk full"), ("ValueError", "bad 2"), ("", "")]
    )
    text = page.get("/queues/mails/dead").text
    for form in fields_of(text, "job.discard"):
        asked = page.post("/do/job.discard", data=form, headers=SAME_SITE).text
        assert re.search(r"Discard (1 job|2 jobs) of queue mails\?", asked)
    form = next(form for form in fields_of(text, "job.discard") if form["filter.group"] in text.split("disk full")[1])
    page.post("/do/job.discard", data={**form, "confirmed": "yes"}, headers=SAME_SITE)
    left = [job["id"] for job in client.queue("mails").dead().jobs]
    assert sorted(left) == ["d0", "d2", "d3"]


def test_all_that_match_an_id_are_only_those(page: TestClient, client: Client) -> None:
    kill_some(client, "mails", [("ValueError", "bad")] * 3)
    text = page.get("/queues/mails/jobs?state=dead&id=d1").text
    form = next(form for form in fields_of(text, "job.retry") if "filter.id" in form)
    chosen = {**form, "which": "matching"}
    asked = page.post("/do/job.discard", data=chosen, headers=SAME_SITE).text
    assert "Discard 1 job of queue mails?" in asked
    assert "id = d1" in asked
    page.post("/do/job.discard", data={**chosen, "confirmed": "yes"}, headers=SAME_SITE)
    assert sorted(job["id"] for job in client.queue("mails").dead().jobs) == ["d0", "d2"]


def test_broken_records_are_shown_as_such_and_can_be_discarded(page: TestClient, client: Client) -> None:
    link, base = client.link(), "forq:queue:{mails}"
    link.call("HSET", f"{base}:jobs", "first", b"garbage")
    link.call("HSET", f"{base}:dead:jobs", "broken@7", b"\xff\x00\nnot json")
    link.call("ZADD", f"{base}:dead", 1_700_000_000_000, "broken@7")
    link.call(
        "HSET", f"{base}:dead:jobs", "text@8", b'p5 1\n["a",null,{}]\n"only text"\n[{}, "odd", {"error": "text"}]'
    )
    link.call("ZADD", f"{base}:dead", 1_700_000_000_001, "text@8")
    assert page.get("/queues/mails/jobs?state=waiting").status_code == 200
    dead = page.get("/queues/mails/jobs?state=dead")
    assert dead.status_code == 200
    assert "broken record" in dead.text
    assert page.get("/queues/mails/dead").status_code == 200
    for path in ("job?id=first", "job?id=broken&fence=7", "job?id=text&fence=8", "job?id=text"):
        assert page.get(f"/queues/mails/{path}").status_code == 200, path
    done = page.post(
        "/do/job.discard", data={"queue": "mails", "id": "broken@7", "confirmed": "yes"}, headers=SAME_SITE
    )
    assert "discarded 1 job" in page.get(done.headers["location"]).text


def test_messages_and_data_are_redacted_also_where_they_are_cut(client: Client, redis_url: str) -> None:
    kill_some(client, "mails", [("ValueError", "card hunter2 refused")])
    token = "s3cret" * 30
    client.create_queue("large", max_data="16mb").enqueue([token] * 4000, id="big")
    with dashboard(redis_url, redact=[r"hunter\d", r"(?:s3cret)+"]) as page:
        for path in ("jobs?state=dead", "dead", "job?id=d0&fence=0"):
            text = page.get(f"/queues/mails/{path}").text
            assert "hunter2" not in text, path
            assert "[redacted]" in text, path
        assert "s3c" not in page.get("/queues/large/job?id=big&show=data").text


def test_errors_of_a_queue_are_redacted(client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = {"message": "no hunter2", "traceback": "Traceback: hunter2"}
    broken = QueueView(
        *("mails", "work", "config_error"), reason="cannot import: hunter2", traceback="hunter2", restart_error=error
    )
    taken = Feed.current

    async def current(feed: Feed) -> View:
        return replace(await taken(feed), queues={"mails": broken})

    monkeypatch.setattr(Feed, "current", current)
    with dashboard(redis_url, redact=[r"hunter\d"]) as page:
        for path, number in (("/", 2), ("/queues/mails", 4)):
            text = page.get(path).text
            assert "hunter2" not in text, path
            assert text.count("[redacted]") == number, path


def test_data_that_json_libraries_refuse_is_shown_somehow(page: TestClient, client: Client) -> None:
    base = "forq:queue:{mails}"
    record = client.link().call("HGET", f"{base}:jobs", "first")
    head = record.partition(b"\n")[0]
    client.link().call("HSET", f"{base}:jobs", "first", head + b'\n["a",null,' + b"[" * 300 + b"]" * 300 + b"]")
    assert page.get("/queues/mails/job?id=first&show=data").status_code == 200


def test_a_page_beyond_the_end_is_the_last_one(page: TestClient) -> None:
    text = page.get("/?page=7").text
    assert "mails" in text
    assert "no queues yet" not in text


def test_an_error_page_has_the_navigation(page: TestClient) -> None:
    assert 'href="/schedules"' in page.get("/queues/none").text


def test_run_now_needs_selected_jobs(page: TestClient) -> None:
    answer = page.post("/do/job.run", data={"queue": "mails", "which": "matching"}, headers=SAME_SITE)
    assert answer.status_code == 400
    assert "selected jobs" in answer.text


def test_an_attempt_shows_its_cause_its_time_and_its_peak_memory(page: TestClient, client: Client) -> None:
    attempt = {"outcome": "stalled", "cause": "oom", "started_at": 1000.0, "ended_at": 1090.0, "peak_memory": 300 << 20}
    client.link().call("HSET", "forq:queue:{mails}:attempts", "first", orjson.dumps(attempt))
    text = re.sub(r"<[^>]+>", " ", page.get("/queues/mails/job?id=first").text)
    shown = " ".join(text.split())
    assert "stalled oom" in shown
    assert "after 1 min 30 s, peak memory 300 MB" in shown


def test_a_reader_sees_no_text_of_errors(client: Client, redis_url: str) -> None:
    link, base = client.link(), "forq:queue:{mails}"
    attempts = b'{"outcome":"failed","error":"hunter2"}\n{"error":{"name":"E","message":"hunter2"}}'
    link.call("HSET", f"{base}:attempts", "first", attempts)

    def read_only(request: HTTPConnection, name: str) -> Level:
        return "read" if KINDS[name] == "view" else "forbidden"

    with dashboard(redis_url, read_only) as page:
        answer = page.get("/queues/mails/job?id=first")
        assert answer.status_code == 200
        assert "hunter2" not in answer.text
        refused = page.get("/queues/mails/jobs?state=scheduled&error=hunter")
        assert refused.status_code == 403
        assert "filter by error" in refused.text


def test_a_new_queue_has_a_page_at_once(page: TestClient, client: Client) -> None:
    page.get("/")
    client.create_queue("brandnew")
    assert page.get("/queues/brandnew").status_code == 200


@pytest.fixture
def brief_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live page ends after its first update."""
    monkeypatch.setattr("forq.web.app.STREAM_SECONDS", 0.0)


@pytest.mark.usefixtures("brief_streams")
@pytest.mark.parametrize("path", ["/find?id=first", "/schedules", "/queues/mails/dead", "/queues/mails/options"])
def test_a_page_without_live_updates_has_no_stream(page: TestClient, path: str) -> None:
    assert 'data-live=""' in page.get(path).text
    answer = page.get(f"/live{path}")
    assert answer.status_code == 400
    assert "no live updates" in answer.text


def test_the_head_of_a_live_page_is_answered_at_once(page: TestClient) -> None:
    answer = page.head("/live/")
    assert (answer.status_code, answer.headers["content-length"]) == (200, "0")


@pytest.mark.usefixtures("brief_streams")
def test_a_live_list_of_jobs_does_not_repeat_its_search(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(verbs: RedisVerbs, params: object) -> object:
        raise AssertionError("a search")

    monkeypatch.setattr(RedisVerbs, "jobs", search)
    answer = page.get("/live/queues/mails/jobs?state=scheduled&type=mail")
    assert "event: update" in answer.text
    assert "scheduled <small>1</small>" in answer.text
