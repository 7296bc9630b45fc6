"""When the installed version of a peer was released, from the registry that it came from: PyPI, npm or Debian.

A date is None where the registry does not tell.
"""

import gzip
import json
import urllib.request
from datetime import date, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from benchmarks.installing import Unavailable, run

_PYPI = "https://pypi.org/pypi"
_SECONDS = 20


def on_pypi(package: str, version: str) -> date | None:
    try:
        with urllib.request.urlopen(f"{_PYPI}/{package}/json", timeout=_SECONDS) as reply:
            return pypi_date(json.load(reply), version)
    except (OSError, ValueError):
        return None


def pypi_date(metadata: dict[str, Any], version: str) -> date | None:
    """The day of the version's first file."""
    files = metadata.get("releases", {}).get(version, [])
    if not files and metadata.get("info", {}).get("version") == version:
        files = metadata.get("urls", [])
    times = [file["upload_time_iso_8601"] for file in files if file.get("upload_time_iso_8601")]
    return datetime.fromisoformat(min(times)).date() if times else None


def on_npm(npm: str, package: str, version: str) -> date | None:
    try:
        times = json.loads(run([npm, "view", package, "time", "--json"]))
        return datetime.fromisoformat(times[version]).date()
    except (Unavailable, ValueError, KeyError, TypeError):
        return None


def in_debian(root: Path, package: str) -> date | None:
    """The day of the newest entry of the package's changelog: when Debian packed it."""
    try:
        with gzip.open(root / "usr/share/doc" / package / "changelog.Debian.gz", "rt", errors="replace") as file:
            return changelog_date(file.read())
    except OSError:
        return None


def changelog_date(changelog: str) -> date | None:
    signed = next((line for line in changelog.splitlines() if line.startswith(" -- ")), "")
    try:
        return parsedate_to_datetime(signed.partition(">")[2].strip()).date()
    except ValueError:
        return None
