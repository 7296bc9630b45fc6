"""The command `forq`."""

import argparse
import sys

from forq.errors import ConfigError
from forq.procs.standard_streams import open_missing_streams
from forq.settings import SERVICE
from forq.version import VERSION
from forq.web.settings import check_packages


def main() -> int:
    open_missing_streams()
    if sys.argv[1:2] == ["web"]:
        try:
            # Before its arguments are declared, which needs the packages, too.
            check_packages("forq web")
        except ConfigError as exc:
            print(f"forq: {exc}", file=sys.stderr)
            return exc.exit_code
    arguments = parser_for(*sys.argv[1:2]).parse_args()
    if arguments.command == "pipeline":
        from forq.pipeline import cli

        return cli.run(arguments)
    if arguments.command == "bridge":
        from forq.bridge import run as bridge

        return bridge.run(arguments)
    if arguments.command == "web":
        from forq.web import run as web

        return web.run(arguments)
    if arguments.command == "app":
        from forq.app import command

        return command.run(arguments)
    if arguments.command == "web-user":
        from forq.web import users

        return users.run(arguments)
    from forq.supervisor.run import run

    given = {name: value for name, value in vars(arguments).items() if name != "command"}
    return run(given)


def parser_for(*names: str) -> argparse.ArgumentParser:
    """The parser with the arguments of `run` and of these commands; other commands are listed without arguments."""
    parser = argparse.ArgumentParser(prog="forq", description="fork per queue: job queues with a process each")
    parser.add_argument("--version", action="version", version=f"forq {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a supervisor in the foreground")
    run.add_argument(
        "--config", metavar="FILE", help="config file (FORQ_CONFIG; default: /etc/forq/forq.toml if it exists)"
    )
    run.add_argument(
        "--app",
        action="append",
        dest="apps",
        metavar="MODULE:APP",
        help="run the tasks of this forq.App, imported from the current directory (repeatable)",
    )
    run.add_argument(
        "--reload",
        action="store_true",
        default=None,
        help="for development: load the code of an app again when one of its files changes",
    )
    for setting in SERVICE.values():
        if setting.flag is not None:
            run.add_argument(
                f"--{setting.name.replace('_', '-')}",
                dest=setting.name,
                help=setting.flag_help,
                **({"metavar": setting.flag} if setting.flag else {"action": "store_true", "default": None}),
            )
    app = commands.add_parser("app", help="show the tasks, queues and schedules of an app, or create its queues")
    if "app" in names:
        from forq.app.command import add_arguments as add_arguments_of_app

        add_arguments_of_app(app)
    bridge = commands.add_parser("bridge", help="producers and workers in any language, one JSON message per line")
    if "bridge" in names:
        from forq.bridge.run import add_arguments

        add_arguments(bridge)
    web = commands.add_parser("web", help="the dashboard, without a supervisor (forq[web])")
    if "web" in names:
        from forq.web.run import add_arguments as add_arguments_of_web

        add_arguments_of_web(web)
    web_user = commands.add_parser("web-user", help="set the password of a user of the dashboard, or remove the user")
    if "web-user" in names:
        from forq.web.users import add_arguments as add_arguments_of_web_user

        add_arguments_of_web_user(web_user)
    pipeline = commands.add_parser("pipeline", help="history, audit, report and replay, on Spark (forq[pipeline])")
    if "pipeline" in names:
        # Importing Spark takes longer than starting a supervisor.
        from forq.pipeline.cli import add_commands

        add_commands(pipeline)
    return parser


if __name__ == "__main__":
    sys.exit(main())
