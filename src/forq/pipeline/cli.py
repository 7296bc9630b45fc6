"""The command line of `forq pipeline`. Without Spark it only lists the commands."""

import argparse
import os
import sys
from importlib import import_module
from importlib.util import find_spec

from forq.errors import ConfigError, ForqError
from forq.paths import key_prefix, redis_url, state_dir

COMMANDS = {
    "ingest": "read the journals into the history, each event once",
    "audit": "check that no event was lost, duplicated or changed",
    "report": "write an HTML page about throughput, waits and failures",
    "replay": "enqueue dead jobs again, selected by a predicate",
}
MODULES = {
    "ingest": "forq.pipeline.ingest",
    "audit": "forq.pipeline.audit.run",
    "report": "forq.pipeline.report.page",
    "replay": "forq.pipeline.replay",
}


def add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="pipeline_command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        add_common(command)
        if find_spec("pyspark") is not None:
            import_module(MODULES[name]).add_arguments(command)


def add_common(command: argparse.ArgumentParser) -> None:
    """The options of every command."""
    command.add_argument(
        "--redis", metavar="URL", default=redis_url(), help="default: FORQ_REDIS, else the embedded server"
    )
    command.add_argument(
        "--prefix", default=key_prefix(), help="prefix of all Redis keys (default: FORQ_PREFIX, else forq:)"
    )
    command.add_argument(
        "--history",
        metavar="DIR",
        default=os.path.join(state_dir(), "history"),
        help="directory or file-system URL (default: history in the state directory)",
    )


def run(arguments: argparse.Namespace) -> int:
    if find_spec("pyspark") is None:
        print("forq: the pipeline needs Spark: pip install 'forq[pipeline]'", file=sys.stderr)
        return ConfigError.exit_code
    try:
        code: int = import_module(MODULES[arguments.pipeline_command]).run(arguments)
        return code
    except ForqError as exc:
        print(f"forq: {exc}", file=sys.stderr)
        return exc.exit_code
