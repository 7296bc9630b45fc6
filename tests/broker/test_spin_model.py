"""The Spin models in docs/design/model, if Spin is installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.thorough import only_in_test_all

MODEL = Path(__file__).resolve().parents[2] / "docs" / "design" / "model"


def without_states(text: str) -> str:
    """Other versions of Spin may report other numbers of states."""
    return re.sub(r"\d+ states", "N states", text)


@pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("gcc")), reason="spin and gcc are not installed (apt install spin gcc)"
)
@only_in_test_all
@pytest.mark.timeout(400)
def test_the_models_hold_with_their_guards_and_fail_without() -> None:
    done = subprocess.run([str(MODEL / "check.sh")], capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w+): .*: (holds|fails) \(\d+ states\)$", done.stdout, re.MULTILINE) == [
        *[("fenced", "holds")] * 3,
        *[("numbered", "holds")] * 3,
        ("unfenced", "fails"),
        ("unnumbered", "fails"),
        ("marked", "holds"),
        ("unmarked", "fails"),
        ("misordered", "fails"),
        ("uncompared", "fails"),
        *[("batch", "holds")] * 2,
        *[("child", "holds")] * 2,
        ("again", "holds"),
        *[("held", "holds")] * 2,
        ("unverified", "fails"),
        ("doubled", "fails"),
        ("removed", "fails"),
        ("unpending", "fails"),
        ("edgeless", "fails"),
        *[("nonceless", "fails")] * 2,
        ("unsealed", "fails"),
        ("forgetful", "fails"),
        ("undated", "fails"),
        ("late", "fails"),
        *[("unstamped", "fails")] * 2,
    ]
    assert without_states(done.stdout) in without_states((MODEL / "README.md").read_text()), (
        "the output in the page is outdated"
    )


def test_without_its_tools_the_check_names_what_to_install(tmp_path: Path) -> None:
    for tool in ("sh", "dirname"):
        path = shutil.which(tool)
        assert path is not None
        (tmp_path / tool).symlink_to(path)
    done = subprocess.run(
        ["/bin/sh", str(MODEL / "check.sh")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode == 69
    assert done.stderr == "model: spin is not installed (on Debian: apt install spin gcc)\n"
