"""Runs a supervisor that reports another version: `python -m tests.end_to_end.versioned_supervisor VERSION run …`."""

import sys

from forq import version

if __name__ == "__main__":
    version.VERSION = sys.argv.pop(1)
    # Imported afterwards, because other modules copy the version.
    from forq import cli

    sys.argv[0] = "forq"
    sys.exit(cli.main())
