"""A standalone Spark cluster on loopback: one master and some workers."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark

from forq.pipeline.session import provide_java
from tests.support.drive.wait import wait_until

SPARK_HOME = Path(pyspark.__file__).parent


@dataclass(frozen=True)
class Cluster:
    master: str

    def submit(self, *arguments: str, seconds: float = 300.0, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs `forq pipeline ARGUMENTS` on this cluster."""
        where = subprocess.run(
            [sys.executable, "-m", "forq.pipeline.submit"], capture_output=True, text=True, check=True, env=_environ()
        ).stdout.strip()
        settings = ["--conf", "spark.ui.enabled=false", "--conf", "spark.driver.host=127.0.0.1"]
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.master, *settings, where, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, env=_environ(**environ), timeout=seconds, check=False
        )


@contextmanager
def standalone(workers: int = 2) -> Iterator[Cluster]:
    provide_java()
    directory = Path(tempfile.mkdtemp(prefix="forq-spark-"))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        place = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        processes.append(_start("deploy.master.Master", directory / "master.log", *place))
        master = wait_until(
            lambda: _find(directory / "master.log", r"(spark://127\.0\.0\.1:\d+)"), 60.0, "master is up"
        )
        for number in range(workers):
            log = directory / f"worker{number}.log"
            size = ("--cores", "1", "--memory", "1g", "--work-dir", str(directory / f"work{number}"))
            processes.append(_start("deploy.worker.Worker", log, *place, *size, master))
        for number in range(workers):
            log = directory / f"worker{number}.log"
            wait_until(lambda log=log: _find(log, r"(Successfully registered)"), 60.0, f"{log.name}")  # type: ignore[misc]
        yield Cluster(master)
    finally:
        for process in reversed(processes):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _start(name: str, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.{name}", *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=_environ(), start_new_session=True)


def _environ(**more: str) -> dict[str, str]:
    quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    return {
        **os.environ,
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_DAEMON_JAVA_OPTS": quick,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        **more,
    }


def _find(log: Path, pattern: str) -> str | None:
    match = re.search(pattern, log.read_text(errors="replace")) if log.exists() else None
    return match[1] if match else None
