"""The Prometheus page in both formats. Docs, alerts and dashboard must name only exported metrics."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser

from forq.services.metrics_page import BOUNDS, render
from forq.services.snapshot import Activity, Snapshot
from tests.support.drive.metrics import (
    Samples,
    make_snapshot,
    metric_names,
    queue_counts,
    queue_stats,
    queue_status,
    read_samples,
)

ROOT = Path(__file__).resolve().parent.parent.parent
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
LIMITS = {"rate": "5/1s", "max_active": 0, "may_begin": 4, "limited_workers": 1}


def full_snapshot(*names: str) -> Snapshot:
    counts = queue_counts(waiting=3, done=5, kept=6, oldest_waiting_seconds=2.5, next_due_seconds=7.0, limits=LIMITS)
    return make_snapshot(
        [queue_status(name) for name in names],
        counts=dict.fromkeys(names, counts),
        activity={name: Activity(busy=1, longest_seconds=1.5) for name in names},
        stats={name: queue_stats({3: 2, 11: 5, 39: 1}) for name in names},
    )


def read_openmetrics(text: str) -> Samples:
    families = parser.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def page(snapshot: Snapshot, accept: str = "") -> str:
    return render(snapshot, healthy=True, accept=accept)[0].decode()


def test_values_are_exported_under_their_names() -> None:
    samples = read_samples(page(full_snapshot("a")))
    queue = ("queue", "a")
    assert samples["forq_jobs", (queue, ("state", "waiting"))] == 3
    assert samples["forq_jobs", (queue, ("state", "kept"))] == 6
    assert samples["forq_done_total", (queue,)] == 5
    assert samples["forq_oldest_waiting_seconds", (queue,)] == 2.5
    assert samples["forq_next_due_seconds", (queue,)] == 7.0
    assert samples["forq_limit_may_begin", (queue,)] == 4
    assert samples["forq_queue_state", (("mode", "work"), queue, ("state", "running"))] == 1
    assert samples["forq_healthy", ()] == 1


def test_buckets_are_cumulative_and_larger_values_count_only_in_infinity() -> None:
    samples = read_samples(page(full_snapshot("a")))
    buckets = {
        float(labels[0][1]): value for (name, labels), value in samples.items() if name == "forq_run_seconds_bucket"
    }
    expected = {2**bound / 1e6: 2 if bound < 11 else 7 for bound in BOUNDS} | {float("inf"): 8}
    assert buckets == expected
    assert samples["forq_run_seconds_count", (("queue", "a"),)] == 8


def test_the_page_has_the_same_values_in_openmetrics() -> None:
    body, content_type = render(full_snapshot("a"), healthy=True, accept=OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert read_openmetrics(body.decode()) == read_samples(page(full_snapshot("a")))


@pytest.mark.parametrize("name", ['say "hi"', "back\\slash", "new\nline", "ünï", "{queue}", "%s"])
def test_any_queue_name_is_a_label_value(name: str) -> None:
    for samples in (read_samples(page(full_snapshot(name))), read_openmetrics(page(full_snapshot(name), OPENMETRICS))):
        named = {dict(labels)["queue"] for _, labels in samples if "queue" in dict(labels)}
        assert named == {name}


def test_values_from_redis_are_left_out_while_it_is_down() -> None:
    snapshot = replace(full_snapshot("a"), counts={}, round_trip_seconds=None)
    samples = read_samples(page(snapshot))
    assert samples["forq_redis_up", ()] == 0
    assert not [name for name, _ in samples if name in ("forq_jobs", "forq_done_total")]
    assert samples["forq_run_seconds_count", (("queue", "a"),)] == 8


def test_without_the_supervisor_the_other_values_are_exported() -> None:
    samples = read_samples(page(replace(full_snapshot("a"), status=None)))
    assert samples["forq_supervisor_up", ()] == 0
    assert samples["forq_done_total", (("queue", "a"),)] == 5


def test_a_paused_queue_is_shown_as_paused() -> None:
    snapshot = replace(full_snapshot("a"), counts={"a": queue_counts(paused=True)})
    samples = read_samples(page(snapshot))
    states = [dict(labels)["state"] for name, labels in samples if name == "forq_queue_state"]
    assert states == ["paused"]


def test_a_thousand_queues_take_less_than_a_second_of_cpu() -> None:
    snapshot = full_snapshot(*(f"queue-{number}" for number in range(1000)))
    began = time.process_time()
    text = page(snapshot)
    took = time.process_time() - began
    assert len(read_samples(text)) > 70_000
    assert took < 1.0


def test_the_docs_describe_every_metric_and_no_other() -> None:
    described = set(re.findall(r"^\| `(forq_\w+)` \|", (ROOT / "docs/guide/metrics.md").read_text(), re.MULTILINE))
    exported = {re.sub("_(bucket|count|sum)$", "", name) for name in metric_names(page(full_snapshot("a")))}
    assert described == exported


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for panel in dashboard["panels"] for each in (panel, *panel.get("panels", ()))]


def test_the_dashboard_uses_only_exported_metrics() -> None:
    exported = metric_names(page(full_snapshot("a")))
    dashboard = json.loads((ROOT / "etc/grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in panels_of(dashboard) for target in panel.get("targets", ())]
    variables = [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    queries = [query if isinstance(query, str) else query["query"] for query in variables]
    assert len(expressions) > 20
    for text in (*expressions, *queries):
        named = set(re.findall(r"\bforq_\w+", text))
        assert named, text
        assert named <= exported, text


def test_the_alerts_in_the_docs_use_only_exported_metrics() -> None:
    exported = metric_names(page(full_snapshot("a")))
    rules = re.findall(r"expr: (.*)", (ROOT / "docs/guide/metrics.md").read_text())
    assert len(rules) >= 8
    for rule in rules:
        assert set(re.findall(r"\bforq_\w+", rule)) <= exported, rule


def test_the_dashboard_can_be_imported() -> None:
    dashboard = json.loads((ROOT / "etc/grafana-dashboard.json").read_text())
    assert dashboard["schemaVersion"] >= 39
    assert dashboard["id"] is None
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "queue"}
    panels = panels_of(dashboard)
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == [
        "Overview",
        "Queue: $queue",
        "Workers",
        "Redis",
    ]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["targets"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
