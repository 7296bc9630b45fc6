"""forqctl flow and batch."""

import json
from typing import Any

import pytest

from forq import errors
from tests.ctl.fake_supervisor import FakeSupervisor, forqctl


def job(name: str, *needs: int, state: str = "held", when: str = "done", label: str = "") -> dict[str, Any]:
    return {"queue": "q", "id": name, "label": label, "needs": list(needs), "when": when, "state": state}


FLOW = {
    "id": "f",
    "queue": "q",
    "jobs": [
        job("a", state="done", label="fetch"),
        job("b", 0, state="active", label="parse"),
        job("c", 0, state="dead", label='say "\x1b[31m"'),
        job("d", 1, 2, when="ended"),
        job("e", 0, 1, 2, 3, label="all"),
    ],
}
BATCH = {
    "id": "b1",
    "queue": "q",
    "state": "sealed",
    "members": 4,
    "open": 1,
    "done": 1,
    "dead": 1,
    "other": 1,
    "progress": 0.75,
    "ended_at": None,
}


def test_flow_indents_jobs_below_those_that_they_wait_for(fake: FakeSupervisor) -> None:
    fake.answers["flow"] = FLOW
    assert forqctl(fake, "flow", "f") == (
        0,
        "TASK              ID  QUEUE  STATE   WAITS FOR\n"
        "fetch             a   q      done    -\n"
        "  parse           b   q      active  a\n"
        '  say "\\x1b[31m"  c   q      dead    a\n'
        "    job           d   q      held    b c (ended)\n"
        "      all         e   q      held    a b c and 1 more\n",
        "",
    )
    assert fake.calls == [("flow", {"id": "f"})]


def test_flow_prints_a_mermaid_diagram(fake: FakeSupervisor) -> None:
    fake.answers["flow"] = {**FLOW, "jobs": FLOW["jobs"][:4]}
    assert forqctl(fake, "flow", "f", "--mermaid")[1].splitlines() == [
        "graph TD",
        '  j0["fetch<br/>done"]',
        '  j1["parse<br/>active"]',
        '  j2["say #quot;\\x1b[31m#quot;<br/>dead"]',
        '  j3["d<br/>held"]',
        "  j0 --> j1",
        "  j0 --> j2",
        "  j1 -->|ended| j3",
        "  j2 -->|ended| j3",
    ]


def test_flow_and_batch_print_json(fake: FakeSupervisor) -> None:
    fake.answers |= {"flow": FLOW, "batch": BATCH, "batch.cancel": {"cancelled": 2, "more": False}}
    assert json.loads(forqctl(fake, "flow", "f", "--json")[1]) == FLOW
    assert json.loads(forqctl(fake, "batch", "q", "b1", "--json")[1]) == BATCH
    assert json.loads(forqctl(fake, "batch", "q", "b1", "--cancel", "--json")[1]) == {"cancelled": 2}


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("flow", "f"), errors.UnknownFlow("no queue has a flow 'f'")),
        (("batch", "q", "b1"), errors.UnknownBatch("queue 'q' has no batch 'b1'")),
        (("batch", "q", "b1", "--cancel"), errors.UnknownBatch("queue 'q' has no batch 'b1'")),
        (("batch", "q", "b1"), errors.UnknownQueue("no queue 'q'")),
    ],
)
def test_what_is_unknown_exits_with_4(fake: FakeSupervisor, args: tuple[str, ...], error: errors.ForqError) -> None:
    fake.answers |= dict.fromkeys(("flow", "batch", "batch.cancel"), error)
    assert forqctl(fake, *args) == (4, "", f"forqctl: {error}\n")


def test_batch_shows_its_counts(fake: FakeSupervisor) -> None:
    fake.answers["batch"] = BATCH
    assert forqctl(fake, "batch", "q", "b1") == (
        0,
        "batch b1 of queue q: sealed\n"
        "MEMBERS  OPEN  DONE  DEAD  OTHER  PROGRESS\n"
        "      4     1     1     1      1  75 %\n",
        "",
    )
    assert fake.calls == [("batch", {"name": "q", "id": "b1"})]
    fake.answers["batch"] = {**BATCH, "state": "failed", "ended_at": 1700000000.5}
    first = forqctl(fake, "batch", "q", "b1")[1].splitlines()[0]
    assert first == "batch b1 of queue q: failed, ended at 2023-11-14T22:13:20.500Z"


def test_batch_cancel_continues_until_no_member_is_left(fake: FakeSupervisor) -> None:
    parts = [{"cancelled": 1000, "more": True}, {"cancelled": 1, "more": False}]
    fake.answers["batch.cancel"] = lambda params: parts.pop(0)
    assert forqctl(fake, "batch", "q", "b1", "--cancel") == (0, "cancelled 1001 jobs of batch b1\n", "")
    assert fake.calls == [("batch.cancel", {"name": "q", "id": "b1"})] * 2
    parts.append({"cancelled": 1, "more": False})
    assert forqctl(fake, "batch", "q", "b1", "--cancel")[1] == "cancelled 1 job of batch b1\n"
