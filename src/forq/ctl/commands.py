"""The table of forqctl's commands: names, arguments, help, and where each is carried out. No logic.

The parser, the help, the man page and the shell completion are made from it; manual_pages.py has more words for people.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Argument:
    """One argument, in the words of argparse: its names and the keywords of add_argument."""

    __slots__ = ("completes", "keywords", "names")

    def __init__(self, *names: str, completes: str = "", **keywords: Any) -> None:
        self.names = names
        self.keywords = keywords
        # What the shell offers for the value: "file", "dir" or nothing.
        self.completes = completes


class Command:
    """One command: carried out by a function in `home`, a module of forq.ctl.verbs, of the command's name or
    of that of `function`."""

    __slots__ = ("arguments", "function", "home", "name", "summary")

    def __init__(self, name: str, home: str, summary: str, *arguments: Argument, function: str = "") -> None:
        self.name = name
        self.home = home
        self.function = function or name
        self.summary = summary
        self.arguments = arguments


GLOBALS = (
    Argument("--socket", completes="file", metavar="PATH", help="the control socket (default: FORQ_SOCKET)"),
    Argument("--json", action="store_true", help="print one JSON document"),
    Argument("--timeout", metavar="D", help="how long to wait for an answer (default: 30s)"),
)

NAME = Argument("name", metavar="NAME", help="the queue")
ID = Argument("id", metavar="ID", help="the job")
KEY = Argument("key", metavar="KEY", help="the schedule")
# The same of every command that takes options of a queue.
OPTIONS = (
    Argument("options", nargs="*", metavar="OPTION=VALUE", help="an option of the queue"),
    Argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="the same (repeatable)"),
)
ITEM = Argument("id", nargs="?", metavar="ID", help="this item (default: any)")
IMPORT_WAIT = Argument("--wait", metavar="D", help="how long the import of its handler may take (default: 60s)")

COMMANDS = (
    Command(
        "create",
        "queues",
        "make a queue and start its processes",
        NAME,
        Argument("--handler", metavar="M:F", help="the function that handles its jobs, or exec:PROGRAM"),
        Argument(
            "--type", action="append", default=[], metavar="T=M:F", help="the function for jobs of type T (repeatable)"
        ),
        Argument(
            "--path",
            action="append",
            default=[],
            completes="dir",
            metavar="DIR",
            help="where handlers are imported from (repeatable)",
        ),
        IMPORT_WAIT,
        Argument("--no-wait", action="store_true", help="make the queue whether its handler can be imported or not"),
        Argument("--fail-handler", metavar="M:F", help="the function for jobs that failed for good"),
        Argument(
            "--mode",
            choices=("work", "auto_release", "on_request", "external"),
            help="who gets its jobs: its handler, those who ask, external workers "
            "(default: `mode` of the config file, else work)",
        ),
        *OPTIONS,
    ),
    Command(
        "delete",
        "queues",
        "stop a queue's processes and remove it",
        NAME,
        Argument("--force", action="store_true", help="also when it still holds jobs"),
    ),
    Command(
        "status",
        "status",
        "show the queues, or some of them in detail",
        Argument("names", nargs="*", metavar="NAME", help="a queue"),
        Argument("--check", action="store_true", help="exit with 3 unless everything is healthy"),
        Argument("--memory", action="store_true", help="with each process's share of memory (PSS)"),
    ),
    Command(
        "top",
        "top",
        "show the queues as they are now, again and again, with keys to pause and resume them",
        Argument("--interval", default="1s", metavar="D", help="how often (default: 1s)"),
        Argument("--plain", action="store_true", help="a block of text each time, also on a terminal"),
        Argument("--count", type=int, metavar="N", help="end after so many blocks (plain or JSON)"),
    ),
    Command(
        "jobs",
        "jobs",
        "list the jobs of a queue",
        NAME,
        Argument(
            "--state",
            choices=("waiting", "scheduled", "active", "blocked", "retry", "done", "dead"),
            help="only jobs in this state",
        ),
        Argument("--limit", type=int, metavar="N", help="at most so many"),
        Argument("--after", metavar="CURSOR", help="go on where the last page ended"),
    ),
    Command("job", "jobs", "show one job", NAME, ID),
    Command(
        "push",
        "push",
        "add a job, or one per line of a file",
        NAME,
        Argument("data", nargs="?", metavar="JSON", help="the job's data"),
        Argument("--file", completes="file", metavar="F.jsonl", help="a file with one JSON value per line; - is stdin"),
        Argument("--records", action="store_true", help="each line of the file is an object with data, id, priority …"),
        Argument("--id", metavar="ID", help="the job's id (default: a new one)"),
        Argument("--identifier", metavar="TEXT", help="a text to recognise the job by"),
        Argument("--priority", type=int, choices=range(10), metavar="0-9", help="0 is served first (default: 5)"),
        Argument("--token", metavar="T", help="makes repeating this call harmless"),
        Argument("--type", metavar="T", help="picks one of the queue's handlers"),
        Argument("--in", dest="run_in", metavar="D", help="not before this time has passed (90s, 10m, 2h)"),
        Argument("--at", dest="run_at", metavar="TIME", help="not before this time (2026-12-01T09:00+01:00)"),
        Argument(
            "--if-exists", choices=("update", "skip", "refuse"), help="when the id is taken (default: update that job)"
        ),
        Argument("--no-update-data", action="store_true", help="when the id is taken: leave that job's data"),
        Argument(
            "--update-run-at",
            choices=("true", "false", "if_later", "if_earlier"),
            help="when the id is taken: change its time (default: true)",
        ),
        Argument(
            "--reset-counts", choices=("yes", "no"), help="when the id is taken: its counts (default: as the data)"
        ),
        Argument("--durable", choices=("replica",), help="succeed only if it is on a replica of Redis too"),
    ),
    Command(
        "await",
        "releases",
        "wait until a queue of mode auto_release releases an item, and print it",
        NAME,
        ITEM,
        Argument("--wait", metavar="D", help="give up after this time (default: never)"),
        function="await_release",
    ),
    Command(
        "dequeue",
        "releases",
        "take an item out of a queue of mode on_request, and print it",
        NAME,
        ITEM,
        Argument("--wait", metavar="D", help="wait so long for one (default: not at all)"),
        Argument("--lease", metavar="D", help="it goes back in line unless it is acknowledged (ack) within this time"),
    ),
    Command(
        "ack",
        "releases",
        "acknowledge an item that was dequeued with a lease",
        NAME,
        ID,
        Argument("fence", type=int, metavar="FENCE", help="as dequeue printed it"),
        Argument("awaiter", metavar="AWAITER", help="as dequeue printed it"),
    ),
    Command(
        "schedule",
        "schedules",
        "make a job again and again: every so often, or at the times of a cron expression",
        NAME,
        KEY,
        Argument("--every", metavar="D", help="how often (30s, 5m, 1d); the first time is now"),
        Argument("--cron", metavar="EXPR", help="when: minute hour day month weekday"),
        Argument("--zone", metavar="Z", help="the time zone of the cron expression (default: UTC)"),
        Argument("--data", metavar="JSON", help="the data of the jobs (default: null)"),
        Argument("--priority", type=int, choices=range(10), metavar="0-9", help="0 is served first (default: 5)"),
        Argument("--type", metavar="T", help="picks one of the queue's handlers"),
        Argument(
            "--overlap", choices=("skip", "queue"), help="when the last job is unfinished (default: skip that time)"
        ),
        Argument("--catch-up", choices=("once", "all", "none"), help="for times when nobody was there (default: once)"),
        Argument("--jitter", metavar="D", help="each job is late by a random part of this (default: 0)"),
        Argument("--dry-run", action="store_true", help="only show the next five times"),
    ),
    Command(
        "schedules",
        "schedules",
        "list the schedules of all queues, or of one, or show one with its next five times",
        Argument("name", nargs="?", metavar="NAME", help="the queue"),
        Argument("key", nargs="?", metavar="KEY", help="the schedule"),
    ),
    Command("unschedule", "schedules", "end a schedule; the jobs that it has made stay", NAME, KEY),
    Command("trigger", "schedules", "let a schedule make a job now, and print its id", NAME, KEY),
    Command(
        "dead",
        "dead",
        "list, show, retry or discard dead jobs",
        Argument("action", choices=("list", "show", "retry", "discard"), help="what to do"),
        NAME,
        Argument("id", nargs="?", metavar="ID", help="the job (the newest of that id), or id@fence"),
        Argument("--all", action="store_true", help="retry or discard all that are dead now"),
        Argument("--limit", type=int, metavar="N", help="list at most so many"),
        Argument("--after", metavar="CURSOR", help="go on where the last page ended"),
    ),
    Command(
        "recover",
        "recover",
        "push the jobs of a failed log again",
        Argument(
            "file", completes="file", metavar="FILE", help="logs/NAME/failed.jsonl of a state directory; - is stdin"
        ),
        Argument("--queue", metavar="NAME", help="push them to this queue instead of their own"),
        Argument("--dry-run", action="store_true", help="only read the file and say what would be pushed"),
    ),
    Command("remove", "jobs", "remove a job; one that runs is forgotten when it ends", NAME, ID),
    Command("cancel", "jobs", "cancel a job that has not started", NAME, ID),
    Command("pause", "queues", "start no more jobs of a queue", NAME),
    Command("resume", "queues", "start jobs of a paused queue again", NAME),
    Command(
        "drain",
        "queues",
        "wait until a queue has nothing left to do",
        NAME,
        Argument("--wait", metavar="D", help="give up after this time (default: never)"),
    ),
    Command(
        "set",
        "queues",
        "change options of a queue, at once",
        NAME,
        *OPTIONS,
    ),
    Command(
        "watch",
        "watch",
        "follow a job until it leaves the queue; exits with 1 if it failed for good",
        NAME,
        ID,
        Argument("--wait", metavar="D", help="give up after this time (default: never)"),
    ),
    Command(
        "logs",
        "logs",
        "show what the handlers of a queue print and log",
        NAME,
        Argument("--follow", "-f", action="store_true", help="go on with what they write from now on, until Ctrl-C"),
        Argument("--job", metavar="ID", help="only of this job"),
        Argument("--lines", "-n", type=int, metavar="N", help="the last so many lines (default: 100)"),
    ),
    Command("why", "jobs", "say why a job is not running", NAME, ID),
    Command(
        "kill",
        "running",
        "end a job that is running; it is cancelled",
        NAME,
        ID,
        Argument("--retry", action="store_true", help="put it back in line instead, uncounted"),
    ),
    Command("stack", "running", "show where the running jobs of a queue are", NAME),
    Command(
        "restart",
        "queues",
        "replace a queue's processes by new ones, once these have imported the handler",
        NAME,
        IMPORT_WAIT,
    ),
    Command("ping", "supervisor", "ask whether the supervisor answers"),
    Command("version", "supervisor", "show the versions of forqctl and the supervisor"),
    Command(
        "shutdown",
        "supervisor",
        "stop the supervisor, and wait until it has stopped",
        Argument("--now", action="store_true", help="without letting running jobs finish"),
        Argument("--no-wait", action="store_true", help="do not wait until it has stopped"),
    ),
    Command(
        "completion",
        "completion",
        "print a script that completes forqctl's commands in a shell",
        Argument("shell", choices=("bash", "zsh", "fish"), help="the shell"),
    ),
)

BY_NAME = {command.name: command for command in COMMANDS}
