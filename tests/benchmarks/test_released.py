"""The release date of a version, from what PyPI and Debian tell."""

from datetime import date
from pathlib import Path

import pytest

from benchmarks import released
from benchmarks.installing import Unavailable
from benchmarks.released import changelog_date, in_debian, on_npm, pypi_date


def file_of(time: str) -> dict[str, str]:
    return {"upload_time_iso_8601": time}


def test_a_version_on_pypi_is_as_old_as_its_first_file() -> None:
    files = [file_of("2026-09-24T00:22:57.590654Z"), file_of("2026-09-23T21:22:55.873634Z")]
    assert pypi_date({"releases": {"3.10.0": files}}, "3.10.0") == date(2026, 9, 23)


def test_the_newest_version_may_be_listed_apart() -> None:
    metadata = {"info": {"version": "2.0"}, "urls": [file_of("2026-01-02T00:00:00Z")]}
    assert pypi_date(metadata, "2.0") == date(2026, 1, 2)
    assert pypi_date(metadata, "1.0") is None


def test_a_package_of_debian_is_as_old_as_its_newest_entry() -> None:
    changelog = "x (2-1) unstable; urgency=medium\n\n  * New.\n\n"
    changelog += " -- A B <a@b.org>  Sun, 03 Apr 2022 17:32:11 -0300\n\nx (1-1) unstable\n\n -- A B <a@b.org>  x\n"
    assert changelog_date(changelog) == date(2022, 4, 3)
    assert changelog_date("nothing") is None


def test_a_date_that_the_registry_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> str:
        raise Unavailable("npm ended with 1")

    monkeypatch.setattr(released, "run", refuse)
    assert on_npm("npm", "bullmq", "6.7.0") is None
    monkeypatch.setattr(released, "run", lambda *_: '{"6.6.0": "2026-11-01T00:00:00Z"}')
    assert on_npm("npm", "bullmq", "6.7.0") is None
    assert on_npm("npm", "bullmq", "6.6.0") == date(2026, 11, 1)
    assert in_debian(tmp_path, "ruby-sidekiq") is None
