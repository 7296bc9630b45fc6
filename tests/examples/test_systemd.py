"""etc/examples/systemd: its unit under a real systemd, with the commands of its README; a deploy, and a broken one."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forq.errors import FINAL_EXIT_CODES
from tests.docs.pages import ROOT, blocks
from tests.end_to_end.machine import Machine, booted, why_not
from tests.supervisor.test_systemd_units import analyze, needs_systemd
from tests.support.drive.readme import EXAMPLES

SYSTEMD = EXAMPLES / "systemd"
UNIT = (SYSTEMD / "shop-forq.service").read_text()
FILES = ("shop-forq.service", "forq.toml", "shop/__init__.py", "shop/tasks.py")
# For the test only: a readable log, and the present location of this Python's library.
DROP_IN = """[Service]
StandardOutput=append:/var/log/forq.log
StandardError=append:/var/log/forq.log
Environment=LD_LIBRARY_PATH=/opt/python/lib
"""
# Commands of the README that differ in the machine: it has no index of packages, and units in another directory.
INSTEAD = {
    "python3 -m venv /srv/shop/.venv": "ln -s /opt/forq /srv/shop/.venv",
    "/srv/shop/.venv/bin/pip install ../../..": "true",
    "install -m 644 shop-forq.service /etc/systemd/system/": "install -m 644 shop-forq.service /run/units/",
    "systemctl enable --now shop-forq": "systemctl start shop-forq",
}


@pytest.fixture
def machine() -> Iterator[Machine]:
    if reason := why_not():
        pytest.skip(f"no systemd can be booted: {reason}")
    with booted("") as machine:
        machine.run("mkdir", "-p", "/root/example/shop", "/run/units/shop-forq.service.d")
        for name in FILES:
            machine.write(f"/root/example/{name}", (SYSTEMD / name).read_text(), show=False)
        machine.write("/run/units/shop-forq.service.d/test.conf", DROP_IN)
        yield machine


def install_commands() -> tuple[list[str], list[str]]:
    """Of the installation, and of a deploy."""
    install, deploy = [block.text.splitlines() for block in blocks(SYSTEMD / "README.md") if block.language == "sh"]
    return install, deploy


def billed(machine: Machine) -> str:
    """Runs the session of the README; what its job returned."""
    (session,) = [block.text for block in blocks(SYSTEMD / "README.md") if block.language == "console"]
    commands = [line[2:] for line in session.splitlines() if line.startswith("# ")]
    result, *status = machine.run("sh", "-ec", "\n".join(commands)).splitlines()
    assert status[0] in session
    return result


def test_the_commands_of_the_readme_install_it_and_deploy_new_code(machine: Machine) -> None:
    install, deploy = install_commands()
    assert INSTEAD.keys() <= set(install)
    for command in install:
        machine.run("sh", "-c", f"cd /root/example && {INSTEAD.get(command, command)}")
    assert billed(machine) == "order 42 is billed"
    assert "order 42 is billed\n" in (SYSTEMD / "README.md").read_text()
    shown = machine.show("MainPID", "ActiveState", "StatusText", unit="shop-forq.service")
    assert shown["ActiveState"] == "active"
    assert re.match(r"1 queue, \d jobs? running, Redis ok", shown["StatusText"])
    assert machine.run("stat", "-c", "%U", f"/proc/{shown['MainPID']}") == "shop"

    tasks = (SYSTEMD / "shop/tasks.py").read_text()
    machine.write("/root/example/shop/tasks.py", tasks.replace("is billed", "is billed anew"), show=False)
    for command in deploy:
        machine.run("sh", "-c", f"cd /root/example && {command}")
    assert billed(machine) == "order 42 is billed anew"

    machine.write("/root/example/shop/tasks.py", "import nothing_of_this_name\n", show=False)
    copy, reload = deploy
    machine.run("sh", "-c", f"cd /root/example && {copy}")
    assert "failed" in machine.run(*reload.split(), check=False)
    assert "nothing_of_this_name" in machine.log()
    # The processes go on with the code of the last deploy. (This is for the import of the producer.)
    machine.write("/srv/shop/shop/tasks.py", tasks, show=False)
    assert billed(machine) == "order 42 is billed anew"
    assert machine.show("MainPID", unit="shop-forq.service")["MainPID"] == shown["MainPID"]
    machine.run("systemctl", "stop", "shop-forq")
    assert machine.processes() == {}


@needs_systemd
def test_systemd_analyze_finds_no_error_in_the_unit(tmp_path: Path) -> None:
    shutil.copy(SYSTEMD / "shop-forq.service", tmp_path)
    text = UNIT.replace("/srv/shop/.venv/bin/forqctl", "/bin/true").replace("/srv/shop/.venv/bin/forq", "/bin/true")
    (tmp_path / "shop-forq.service").write_text(text)
    found = analyze("verify", "--man=no", "--recursive-errors=no", tmp_path / "shop-forq.service")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_permanent_failures_are_not_restarted() -> None:
    (prevented,) = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT, re.MULTILINE)
    assert {int(code) for code in prevented.split()} == set(FINAL_EXIT_CODES)


def test_the_guide_shows_lines_of_the_unit() -> None:
    (shown,) = [block for block in blocks(ROOT / "docs/guide/systemd.md") if block.language == "ini"]
    assert set(shown.text.splitlines()) <= set(UNIT.splitlines())
