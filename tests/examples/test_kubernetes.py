"""etc/examples/kubernetes: manifests against the schemas, the example's image and real metrics; probes while Redis is
down; and a state directory that everybody may write to, as an emptyDir is."""

import re
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from forq.errors import ExitCode
from forq.supervisor.supervisor import STOP_MARGIN_SECONDS
from forq.values import parse_duration
from tests.docs.pages import ROOT, blocks
from tests.examples.running_worker import Worker, running_worker
from tests.support.drive.container import Image, container, why_not
from tests.support.drive.readme import EXAMPLES
from tests.support.drive.wait import wait_until

yaml = pytest.importorskip("yaml", reason="the package pyyaml is not installed")
pytestmark = pytest.mark.one_server

KUBERNETES, DOCKER = EXAMPLES / "kubernetes", EXAMPLES / "docker"
# As Kubernetes makes it.
EMPTY_DIR = "mode=777,uid=0,gid=0"


def manifests(name: str) -> list[Any]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


@pytest.fixture
def pod() -> Any:
    (deployment,) = manifests("worker.yaml")
    return deployment["spec"]["template"]["spec"]


@pytest.fixture
def main(pod: Any) -> Any:
    (main,) = pod["containers"]
    return main


@pytest.mark.parametrize("name", ["worker.yaml", "web.yaml", "redis.yaml"])
def test_the_manifests_fit_the_schemas(name: str) -> None:
    reason = "the package kubernetes-validate is not installed (100 MB: pip install kubernetes-validate)"
    validator = pytest.importorskip("kubernetes_validate", reason=reason)
    for manifest in manifests(name):
        validator.validate(manifest, "1.30", strict=True)


def test_kubernetes_waits_longer_than_forq_needs_to_stop(pod: Any) -> None:
    grace_seconds = parse_duration(tomllib.loads((DOCKER / "forq.toml").read_text())["stop_grace"])
    assert pod["terminationGracePeriodSeconds"] > grace_seconds + STOP_MARGIN_SECONDS


def test_the_manifest_fits_the_image(main: Any) -> None:
    image = Image.read(DOCKER)
    mounted = {mount["mountPath"] for mount in main["volumeMounts"]}
    assert mounted == {image.volume, "/tmp"}
    assert main["startupProbe"]["exec"]["command"] == main["livenessProbe"]["exec"]["command"] == image.health
    (metrics,) = main["ports"]
    listen = tomllib.loads((DOCKER / "forq.toml").read_text())["metrics"]["listen"]
    assert listen == f"0.0.0.0:{metrics['containerPort']}"
    assert "command" not in main


def test_the_readme_names_files_and_objects_that_exist() -> None:
    commands = "".join(block.text for block in blocks(KUBERNETES / "README.md") if block.language in ("sh", "console"))
    files = set(re.findall(r"--filename (\S+)", commands))
    assert files == {file.name for file in KUBERNETES.glob("*.yaml")}
    objects = {(each["kind"].lower(), each["metadata"]["name"]) for file in files for each in manifests(file)}
    for kind, name in re.findall(r"\b(deployment)/(\S+)", commands):
        assert (kind, name) in objects
    for name in re.findall(r"//(shop-\w+)", commands):
        assert ("service", name) in objects
    (scaled,) = manifests("scaling.yaml")
    assert ("deployment", scaled["spec"]["scaleTargetRef"]["name"]) in objects


def test_a_directory_that_everybody_may_write_to_needs_the_variable(tmp_path: Path, main: Any) -> None:
    """Also: while Redis is down, the pod is alive but not ready."""
    (strict_modes,) = [each["value"] for each in main["env"] if each["name"] == "FORQ_STRICT_MODES"]
    with running_worker(tmp_path, environ={"FORQ_STRICT_MODES": strict_modes}, volume_options=EMPTY_DIR) as worker:
        assert probes(worker, main) == (0, 200)
        check_query(worker)
        worker.redis.stop()
        wait_until(lambda: probes(worker, main) == (0, 503), what="Redis is missed")
        worker.redis.start()
        wait_until(lambda: probes(worker, main) == (0, 200), 40, what="it is ready again")


def test_without_the_variable_it_does_not_start() -> None:
    if reason := why_not():
        pytest.skip(f"no container can be made: {reason}")
    with container(DOCKER, {"FORQ_REDIS": "redis://127.0.0.1:1"}, volume_options=EMPTY_DIR) as refused:
        assert refused.process.wait(30) == ExitCode.CONFIG
        assert "FORQ_STRICT_MODES=no" in refused.log


def test_a_new_pod_takes_over_the_job_of_a_killed_one_when_its_heartbeats_expire(tmp_path: Path) -> None:
    with running_worker(tmp_path, settings='heartbeat = "200ms"\nexpiry = "1s"\n') as killed:
        job = killed.enqueue("bill.enqueue(1, seconds=60)")
        wait_until(lambda: killed.job(job)["state"] == "active", what="the job runs")
        killed.container.kill()
        # Nothing of the state directory is left.
        with container(killed.context, {"FORQ_REDIS": killed.container.environ["FORQ_REDIS"]}) as new:
            new.wait_until_healthy()

            def runs_again() -> bool:
                found = killed.job(job)
                return (found["state"], found["stall_count"]) == ("active", 1)

            wait_until(runs_again, what="the new pod runs the job")


def probes(worker: Worker, main: Any) -> tuple[int, int]:
    """The exit code of the liveness probe, and the status of the readiness probe."""
    alive = worker.container.run(*main["livenessProbe"]["exec"]["command"]).returncode
    return alive, get(worker, main["readinessProbe"]["httpGet"]["path"])[0]


def get(worker: Worker, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{worker.metrics_port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, ""


def check_query(worker: Worker) -> None:
    """The query of scaling.yaml finds metrics of a worker."""
    (scaled,) = manifests("scaling.yaml")
    (trigger,) = scaled["spec"]["triggers"]
    found = re.search(r'(\w+)\{queue="(\w+)", state=~"([\w|]+)"\}', trigger["metadata"]["query"])
    assert found is not None
    metric, queue, states = found.groups()
    page = get(worker, "/metrics")[1]
    for state in states.split("|"):
        assert f'{metric}{{queue="{queue}",state="{state}"}}' in page


def test_the_guide_shows_the_query_of_the_example() -> None:
    (shown,) = [block for block in blocks(ROOT / "docs/guide/containers.md") if block.language == "yaml"]
    (scaled,) = manifests("scaling.yaml")
    assert yaml.safe_load(shown.text)["triggers"] == scaled["spec"]["triggers"]
