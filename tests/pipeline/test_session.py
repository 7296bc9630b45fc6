"""Finding Java, and the time zone of the session."""

import os
import stat
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from forq.errors import ConfigError
from forq.pipeline import session
from forq.pipeline.session import spark_session


def fake_java(folder: Path, version: str) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(stat.S_IRWXU)
    return program


def test_an_active_session_is_reused_and_its_time_zone_is_utc(spark: SparkSession) -> None:
    assert spark_session("another") is spark
    (row,) = spark.sql("select cast(timestamp_micros(1) as string) as text, 1 + 1 as two").collect()
    assert (row.text, row.two) == ("1970-01-01 00:00:00.000001", 2)


def test_java_home_has_precedence_over_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, path = fake_java(tmp_path / "home", "21.0.1"), fake_java(tmp_path / "path", "17.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(path.parent))
    assert session.provide_java() == str(home)
    monkeypatch.delenv("JAVA_HOME")
    assert session.provide_java() == str(path)
    assert os.environ["JAVA_HOME"] == str(tmp_path / "path")


def test_a_too_old_java_is_skipped_and_named_if_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fake_java(tmp_path / "old", "11.0.9"), fake_java(tmp_path / "new", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(new.parent))
    assert session.provide_java() == str(new)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(session, "_bundled", lambda: None)
    with pytest.raises(ConfigError, match=f"Spark needs Java 17 or newer .found: {old}.: set JAVA_HOME"):
        session.provide_java()
