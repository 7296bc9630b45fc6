"""The program of the harness's supervisors: `forq run` with crash points, and with mutated scripts on request."""

import os
import sys
from pathlib import Path

from forq.cli import main
from tests.chaos.crash_points import lay
from tests.chaos.ground import GROUND, Ground
from tests.chaos.unfenced import use_what_is_asked_for

if __name__ == "__main__":
    use_what_is_asked_for()
    lay(Ground(Path(os.environ[GROUND])))
    sys.exit(main())
