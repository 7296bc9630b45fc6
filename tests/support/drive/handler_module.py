"""A module with a handler that a test rewrites, as a deploy would."""

import os
import time
from pathlib import Path

from tests.support.drive.supervisor import HANDLERS


class Module:
    """The file of the module. `arguments` are those of `forqctl create`."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.file = directory / f"{name}.py"
        self.directory = directory
        self.written = time.time()

    def write(self, source: str) -> None:
        self.file.write_text(source)
        # Python would reuse the bytecode for a file of the same size and second.
        self.written += 10
        os.utime(self.file, (self.written, self.written))

    def arguments(self, handler: str = "handle") -> list[str]:
        return [f"--handler={self.name}:{handler}", f"--path={self.directory}", f"--path={HANDLERS}"]
