"""The pipeline under spark-submit, on a real standalone cluster: a master and two workers on loopback."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.spark_cluster import standalone
from tests.support.drive.supervisor import BIN, Forq, running
from tests.support.drive.wait import wait_until


def verdicts(text: str) -> dict[str, Any]:
    """The result of an audit, without run times."""
    result: dict[str, Any] = json.loads(text[text.index("{") :])
    for rule in result["rules"]:
        rule.pop("seconds")
    return result


def pipeline(forq: Forq, *arguments: str) -> str:
    command = [str(BIN / "forq"), "pipeline", *arguments, "--redis", forq.url]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_audit_on_a_cluster_gives_the_same_result_as_on_one_machine(tmp_path: Path) -> None:
    history = str(tmp_path / "history")
    with running() as forq, standalone() as cluster:
        forq.create("good")
        forq.create("bad", "fail", max_retries=1, min_backoff="10ms")
        for name in ("good", "bad"):
            forq.client().queue(name).enqueue_many(range(500))
        wait_until(lambda: forq.queue_status("good")["done"] == 500)
        wait_until(lambda: forq.queue_status("bad")["dead"] == 500)
        ingested = cluster.submit("ingest", "--history", history, "--redis", forq.url, "--json")
        assert ingested.returncode == 0, ingested.stderr[-2000:]
        here = verdicts(pipeline(forq, "audit", "--history", history, "--json"))
        there = cluster.submit("audit", "--history", history, "--redis", forq.url, "--json")
        assert there.returncode == 0, there.stderr[-2000:]
        assert verdicts(there.stdout) == here
        print(f"\non {cluster.master} and on this machine: {json.dumps(here)[:300]}")
