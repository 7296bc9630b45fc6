"""Config files, state directories and their parents are refused if another user can change them."""

import grp
import os
import pwd
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from forq.errors import ConfigError
from forq.procs import ownership
from forq.procs.ownership import changeable_by, refuse_changeable, strict_modes
from forq.supervisor.config import load
from forq.supervisor.statedir import StateDir
from tests.support.drive.supervisor import Forq

OTHER = 65534
NOBODY = pwd.getpwuid(OTHER).pw_name
NOGROUP = grp.getgrgid(OTHER).gr_name
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A config file in its own directory."""
    (tmp_path / "etc").mkdir(mode=0o755)
    file = tmp_path / "etc" / "forq.toml"
    file.write_text("")
    file.chmod(0o644)
    return file


def give_file(file: Path) -> None:
    os.chown(file, OTHER, -1)


def open_to_group(file: Path) -> None:
    os.chown(file, -1, OTHER)
    file.chmod(0o664)


def open_to_all(file: Path) -> None:
    file.chmod(0o666)


def give_directory(file: Path) -> None:
    os.chown(file.parent, OTHER, -1)


def open_directory_to_group(file: Path) -> None:
    os.chown(file.parent, -1, OTHER)
    file.parent.chmod(0o775)


def open_directory_to_all(file: Path) -> None:
    file.parent.chmod(0o777)


CHANGES: list[tuple[Callable[[Path], None], str, str]] = [
    (give_file, "config file {file} can be changed by user {user}, ", "chown root {file}"),
    (open_to_group, "config file {file} can be changed by group {group}, ", "chmod g-w {file}"),
    (open_to_all, "config file {file} can be changed by everybody, ", "chmod o-w {file}"),
    (
        give_directory,
        "config file {file}: its directory {directory} can be changed by user {user}",
        "chown root {directory}",
    ),
    (open_directory_to_group, "{file}: its directory {directory} can be changed by group ", "chmod g-w {directory}"),
    (open_directory_to_all, "{file}: its directory {directory} can be changed by everybody, ", "chmod o-w {directory}"),
]


@pytest.mark.parametrize(("change", "message", "fix"), CHANGES)
def test_a_file_writable_by_others_is_refused_with_the_command_that_fixes_it(
    file: Path, change: Callable[[Path], None], message: str, fix: str
) -> None:
    load({"config": str(file)}, {})
    change(file)
    with pytest.raises(ConfigError) as caught:
        load({"config": str(file)}, {})
    names = {"file": file, "directory": file.parent, "user": NOBODY, "group": NOGROUP}
    assert message.format(**names) in str(caught.value)
    command = fix.format(**names)
    assert f": {command} (or FORQ_STRICT_MODES=no, where nobody else has an account)" in str(caught.value)
    load({"config": str(file)}, {"FORQ_STRICT_MODES": "no"})
    subprocess.run(command.split(), check=True)
    load({"config": str(file)}, {})


def test_a_symbolic_link_is_checked_by_its_target_and_its_location(file: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "forq.toml"
    link.symlink_to(file)
    refuse_changeable(link, "config file")
    open_to_all(file)
    with pytest.raises(ConfigError, match=f"chmod o-w {file} "):
        refuse_changeable(link, "config file")
    file.chmod(0o644)
    give_directory(file)
    with pytest.raises(ConfigError, match=f"chown root {file.parent} "):
        refuse_changeable(link, "config file")


def test_a_sticky_parent_directory_may_be_world_writable_but_not_the_state_directory(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    StateDir(tmp_path / "open" / "state")
    with pytest.raises(ConfigError, match="everybody"):
        StateDir(tmp_path / "open")


def test_a_state_directory_writable_by_another_group_is_refused(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.save_queue("q", {"mode": "on_request"})
    os.chown(state.path, -1, OTHER)
    state.path.chmod(0o750)
    StateDir(state.path)
    state.path.chmod(0o770)
    with pytest.raises(
        ConfigError, match=f"state directory {state.path} can be changed by group .*: chmod g-w {state.path}"
    ):
        StateDir(state.path)
    StateDir(state.path, strict_modes=False)
    state.path.chmod(0o700)
    (state.path / "queues" / "q.json").chmod(0o666)
    with pytest.raises(ConfigError, match=r"queue definition .*/q\.json can be changed by everybody"):
        StateDir(state.path).load_queues()


def test_a_group_with_the_user_as_only_member_is_accepted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = pwd.getpwuid(OTHER)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    monkeypatch.setattr(pwd, "getpwall", lambda: [entry])
    os.chown(file, OTHER, entry.pw_gid)
    file.chmod(0o664)
    assert changeable_by(str(file)) is None
    monkeypatch.setattr(
        pwd, "getpwall", lambda: [entry, pwd.struct_passwd(("b", "x", 4711, entry.pw_gid, "", "/", ""))]
    )
    assert changeable_by(str(file)) == f"group {NOGROUP}"


def test_files_on_a_read_only_mount_may_be_world_writable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_directory_to_all(file)
    monkeypatch.setattr(ownership, "_is_read_only", lambda path: path == str(file.parent))
    refuse_changeable(file, "config file")


def test_forq_strict_modes_accepts_only_yes_and_no() -> None:
    assert [strict_modes({}), strict_modes({"FORQ_STRICT_MODES": "no"})] == [True, False]
    with pytest.raises(ConfigError, match="FORQ_STRICT_MODES = 'off' is not allowed: yes or no"):
        strict_modes({"FORQ_STRICT_MODES": "off"})


def test_forq_run_exits_with_78_and_warns_of_code_writable_by_others(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    give_file(code)
    forq = Forq(settings=f'[queues.q]\nhandler = "m:f"\npath = ["{code}"]\n')
    try:
        forq.start()
        assert f"handler code can be changed by user {NOBODY} queue=q path={code}" in forq.log
        forq.stop()
        give_file(forq.config)
        forq.start(ready=False)
        assert forq.process is not None
        assert forq.process.wait(30) == 78
        assert f"forq: config file {forq.config} can be changed by user {NOBODY}" in forq.log
    finally:
        forq.remove()
