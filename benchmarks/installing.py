"""Installs the peers, each into its own directory below .peers, so that their requirements cannot conflict.

Nothing outside that directory changes. An interrupted install starts over. One that is older than a day is brought up
to date first; if that fails, the version that is there is used. When a version was released: released.py.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.support.drive.postgres import find_postgres

PEERS_DIR = Path(__file__).parent / ".peers"
_INSTALL_SECONDS = 300
_FRESH_SECONDS = 86_400


class Unavailable(Exception):
    """A peer that cannot be measured here; the text gives the reason."""


def run(command: list[str], cwd: Path | None = None) -> str:
    """Returns the output of the command; raises Unavailable if it fails or takes too long."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise Unavailable(f"{Path(command[0]).name}: {exc}") from exc
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{Path(command[0]).name} ended with {done.returncode}: {last[:200]}")
    return done.stdout


def python_venv(name: str, packages: list[str]) -> Path:
    """The Python of an environment that has these packages, each in the newest version that fits the others."""
    directory = PEERS_DIR / name
    python = directory / "bin" / "python"
    newest = ["--upgrade", "--upgrade-strategy", "eager"]
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *newest, *packages]
    if not _ready(directory, packages):
        venv.create(directory, with_pip=True)
        run(install)
        _mark(directory, packages)
    elif _old(directory):
        _refresh(directory, packages, install)
    return python


def python_versions(python: Path, packages: list[str]) -> str:
    names = ", ".join(repr(package.partition("[")[0]) for package in packages)
    code = f"from importlib.metadata import version; print(', '.join(n + ' ' + version(n) for n in ({names},)))"
    return run([str(python), "-c", code]).strip()


def node_modules(packages: list[str]) -> Path:
    """The directory whose node_modules has these packages."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise Unavailable("node or npm is not installed")
    directory = PEERS_DIR / "node"
    newest = [f"{package}@latest" for package in packages]
    install = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(directory), *newest]
    if not _ready(directory, packages):
        directory.mkdir(parents=True)
        run(install)
        _mark(directory, packages)
    elif _old(directory):
        _refresh(directory, packages, install)
    return directory


def sidekiq_root() -> Path:
    return debian_root("sidekiq", "ruby-sidekiq", "ruby-hiredis")


def redis_server() -> Path:
    """The directory of Debian's redis-server, which uses jemalloc like most production servers."""
    root = debian_root("redis", "redis-server")
    program = root / "bin" / "redis-server"
    if not program.exists():
        program.parent.mkdir()
        libraries = root / "usr/lib" / f"{os.uname().machine}-linux-gnu"
        program.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {root}/usr/bin/redis-server "$@"\n')
        program.chmod(0o755)
    return program.parent


def postgres_programs() -> tuple[Path, dict[str, str]]:
    """The folder of PostgreSQL's programs, of this machine or else of Debian, and the environment that they need."""
    if (found := find_postgres()) is not None:
        return found, {}
    root = debian_root("postgres", "postgresql")
    folders = sorted((root / "usr/lib/postgresql").glob("*/bin"))
    if not folders:
        raise Unavailable("the Debian package postgresql has no programs")
    return folders[-1], {"LD_LIBRARY_PATH": str(root / "usr/lib" / f"{os.uname().machine}-linux-gnu")}


def debian_root(name: str, *packages: str) -> Path:
    """Debian packages with their dependencies, unpacked but not installed into the system."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Unavailable(f"{packages[0]} is installed from Debian packages, and this is not Debian")
    directory = PEERS_DIR / name
    if not _ready(directory, packages):
        archives = directory / "archives"
        archives.mkdir(parents=True)
        planned = run(["apt-get", "-qq", "--no-install-recommends", "--simulate", "install", *packages])
        names = [line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")]
        run(["apt-get", "-qq", "download", *names], cwd=archives)
        for archive in sorted(archives.glob("*.deb")):
            run(["dpkg", "-x", str(archive), str(directory / "root")])
        shutil.rmtree(archives)
        _mark(directory, packages)
    return directory / "root"


def ruby_environ(root: Path) -> dict[str, str]:
    """The environment in which an unpacked Ruby finds its own files."""
    triplet = f"{os.uname().machine}-linux-gnu"
    libraries = root / "usr/lib" / triplet
    roots = [root / "usr/lib/ruby/vendor_ruby", *sorted((root / "usr/lib/ruby").glob("3.*"))]
    roots += [*sorted((libraries / "ruby").glob("3.*")), *sorted((libraries / "ruby/vendor_ruby").glob("3.*"))]
    return {
        "LD_LIBRARY_PATH": str(libraries),
        "RUBYLIB": ":".join(str(path) for path in roots),
        "GEM_PATH": str(root / "usr/share/rubygems-integration/all"),
    }


def chart_python() -> Path:
    return python_venv("chart", ["matplotlib"])


def _ready(directory: Path, packages: Sequence[str]) -> bool:
    """Whether these packages are installed there; otherwise removes what is there."""
    try:
        if json.loads((directory / ".ready").read_text() or "[]") == list(packages):
            return True
    except FileNotFoundError:
        pass
    if directory.exists():
        shutil.rmtree(directory)
    print(f"getting {directory.name} into {directory} ...", file=sys.stderr)
    return False


def _old(directory: Path) -> bool:
    return time.time() - (directory / ".ready").stat().st_mtime > _FRESH_SECONDS


def _refresh(directory: Path, packages: Sequence[str], install: list[str]) -> None:
    print(f"looking for newer versions of {directory.name} ...", file=sys.stderr)
    try:
        run(install)
    except Unavailable as exc:
        print(f"{directory.name} stays as it is: {exc}", file=sys.stderr)
    else:
        _mark(directory, packages)


def _mark(directory: Path, packages: Sequence[str]) -> None:
    (directory / ".ready").write_text(json.dumps(list(packages)))
