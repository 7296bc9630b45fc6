"""The table of forqctl's commands: names, arguments, help, and where each is carried out. No logic.

The parser, the help, the man page and the shell completion are all made from it.
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
    """One command: carried out by a function in `home`, a module of forq.supervisor.ctl.verbs, of the command's name or
    of that of `function`.

    For its manual: `more` than the summary, `examples` (what for, and what to type after forqctl), and those `exits`
    that differ from EXITS.
    """

    __slots__ = ("arguments", "examples", "exits", "function", "home", "more", "name", "summary")

    def __init__(
        self,
        name: str,
        home: str,
        summary: str,
        *arguments: Argument,
        function: str = "",
        more: str = "",
        examples: tuple[tuple[str, str], ...] = (),
        exits: dict[int, str] | None = None,
    ) -> None:
        self.name = name
        self.home = home
        self.function = function or name
        self.summary = summary
        self.arguments = arguments
        self.more = more
        self.examples = examples
        self.exits = exits or {}


# Of every command that talks to a supervisor.
EXITS = {
    0: "done",
    1: "refused, or failed",
    2: "wrong arguments, names, data or options",
    5: "not allowed to use the socket",
    6: "no answer in time",
    7: "no supervisor there",
    130: "interrupted",
}


GLOBALS = (
    Argument("--socket", completes="file", metavar="PATH", help="the control socket (default: FORQ_SOCKET)"),
    Argument("--json", action="store_true", help="print one JSON document"),
    Argument("--timeout", metavar="D", help="how long to wait for an answer (default: 30s)"),
)

NAME = Argument("name", metavar="NAME", help="the queue")
ID = Argument("id", metavar="ID", help="the job")
KEY = Argument("key", metavar="KEY", help="the schedule")
ITEM = Argument("id", nargs="?", metavar="ID", help="this item (default: any)")

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
        Argument("--fail-handler", metavar="M:F", help="the function for jobs that failed for good"),
        Argument(
            "--mode",
            choices=("work", "auto_release", "on_request", "external"),
            help="who gets its jobs: its handler, those who ask, external workers "
            "(default: `mode` of the config file, else work)",
        ),
        Argument(
            "--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of the queue (repeatable)"
        ),
        more=(
            "The definition is kept in the state directory, and the queue is served again after a restart. With "
            "the same name and another definition the queue is replaced, with its jobs kept; its mode never "
            "changes."
        ),
        examples=(
            (
                "a queue with a Python handler",
                "create mails --handler app.mails:send --path /srv/app --set timeout=30s",
            ),
            (
                "one whose handler is a program",
                "create video --handler 'exec:/usr/bin/node /srv/video.js' --set concurrency=2",
            ),
        ),
        exits={1: "refused: another mode, too many queues, or the config file defines it"},
    ),
    Command(
        "delete",
        "queues",
        "stop a queue's processes and remove it",
        NAME,
        Argument("--force", action="store_true", help="also when it still holds jobs"),
        more="What the queue still held is in its failed log. All processes below its own are ended too.",
        examples=(("drop a queue with all its jobs", "delete mails --force"),),
        exits={1: "it still holds jobs, and there is no --force", 4: "no such queue"},
    ),
    Command(
        "status",
        "status",
        "show the queues, or some of them in detail",
        Argument("names", nargs="*", metavar="NAME", help="a queue"),
        Argument("--check", action="store_true", help="exit with 3 unless everything is healthy"),
        Argument("--memory", action="store_true", help="with each process's share of memory (PSS)"),
        more=(
            "Without Redis the processes are shown as usual, and counts are -. docs/operations.md explains every state."
        ),
        examples=(
            ("for monitoring", "status --check"),
            ("one queue, with its processes and first jobs", "status mails"),
        ),
        exits={3: "with --check: something is not healthy", 4: "no such queue"},
    ),
    Command(
        "top",
        "top",
        "show the queues as they are now, again and again, with keys to pause and resume them",
        Argument("--interval", default="1s", metavar="D", help="how often (default: 1s)"),
        Argument("--plain", action="store_true", help="a block of text each time, also on a terminal"),
        Argument("--count", type=int, metavar="N", help="end after so many blocks (plain or JSON)"),
        more=(
            "On a terminal it is a screen: arrows or j and k move, enter shows one queue, p pauses, r resumes, s "
            "sorts, q or escape goes back or quits. It needs rich (pip install 'forq[top]'). Anywhere else, with "
            "--plain or TERM=dumb, it is a block of text each time; with --json an object per line. Rates are "
            "differences between two answers, so the first block has none."
        ),
        examples=(
            ("a screen", "top"),
            ("a sample for a script", "top --json --count 2 --interval 5s"),
        ),
        exits={7: "no supervisor there at the start (later it is tried again)"},
    ),
    Command(
        "jobs",
        "jobs",
        "list the jobs of a queue",
        NAME,
        Argument(
            "--state", choices=("waiting", "scheduled", "active", "retry", "dead"), help="only jobs in this state"
        ),
        Argument("--limit", type=int, metavar="N", help="at most so many"),
        Argument("--after", metavar="CURSOR", help="go on where the last page ended"),
        more="In the order in which they will run. Data is not shown: see job.",
        examples=(("the first ten that wait", "jobs mails --state waiting --limit 10"),),
        exits={4: "no such queue"},
    ),
    Command(
        "job",
        "jobs",
        "show one job",
        NAME,
        ID,
        more="With its data, its counts, and its last ten attempts that did not succeed.",
        examples=(("", "job mails 01JD0Z"),),
        exits={4: "no such queue or job"},
    ),
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
        more=(
            "Prints the job's id, when it is stored. A job whose id is taken updates the one that is there, or "
            "waits behind it while it runs."
        ),
        examples=(
            ("one job", 'push mails \'{"to": "a@b.c"}\''),
            ("tomorrow, and safe to repeat", "push mails '{}' --in 1d --token nightly-17"),
            ("one per line", "push mails --file mails.jsonl"),
        ),
        exits={
            1: "refused: the queue is full, the id is taken (--if-exists refuse), Redis is away or out of memory",
            4: "no such queue",
        },
    ),
    Command(
        "await",
        "releases",
        "wait until a queue of mode auto_release releases an item, and print it",
        NAME,
        ITEM,
        Argument("--wait", metavar="D", help="give up after this time (default: never)"),
        function="await_release",
        examples=(("", "await crawl --wait 30s"),),
        exits={
            1: "refused, such as a queue of another mode",
            4: "no such queue",
            6: "nothing was released within --wait, or no answer in time",
        },
    ),
    Command(
        "dequeue",
        "releases",
        "take an item out of a queue of mode on_request, and print it",
        NAME,
        ITEM,
        Argument("--wait", metavar="D", help="wait so long for one (default: not at all)"),
        Argument("--lease", metavar="D", help="it goes back in line unless it is acknowledged (ack) within this time"),
        examples=(
            ("take one and keep it", "dequeue orders"),
            ("take one for ten seconds, to be acknowledged", "dequeue orders --lease 10s"),
        ),
        exits={
            1: "refused, such as a queue of another mode",
            4: "no such queue",
            6: "there was no item within --wait, or no answer in time",
        },
    ),
    Command(
        "ack",
        "releases",
        "acknowledge an item that was dequeued with a lease",
        NAME,
        ID,
        Argument("fence", type=int, metavar="FENCE", help="as dequeue printed it"),
        Argument("awaiter", metavar="AWAITER", help="as dequeue printed it"),
        examples=(("", "ack orders o1 1794849575579031 01a1e55f129976bd"),),
        exits={1: "too late: the item has gone back in line", 4: "no such queue or item"},
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
        more="With a key that is there the schedule is replaced; the same rule keeps its next time.",
        examples=(
            ("every five minutes", 'schedule mails digest --every 5m --data \'{"kind": "digest"}\''),
            ("at half past two in Berlin", "schedule mails nightly --cron '30 2 * * *' --zone Europe/Berlin"),
        ),
        exits={4: "no such queue"},
    ),
    Command(
        "schedules",
        "schedules",
        "list the schedules of all queues, or of one, or show one with its next five times",
        Argument("name", nargs="?", metavar="NAME", help="the queue"),
        Argument("key", nargs="?", metavar="KEY", help="the schedule"),
        examples=(("", "schedules mails nightly"),),
        exits={4: "no such queue or schedule"},
    ),
    Command(
        "unschedule",
        "schedules",
        "end a schedule; the jobs that it has made stay",
        NAME,
        KEY,
        examples=(("", "unschedule mails nightly"),),
        exits={4: "no such queue or schedule"},
    ),
    Command(
        "trigger",
        "schedules",
        "let a schedule make a job now, and print its id",
        NAME,
        KEY,
        examples=(("", "trigger mails nightly"),),
        exits={4: "no such queue or schedule"},
    ),
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
        more="A dead job failed for good. retry puts it in line again with all counts 0; discard forgets it.",
        examples=(
            ("the newest", "dead list mails --limit 10"),
            ("error, attempts and traceback of one", "dead show mails 01JD0Z"),
            ("all of them again", "dead retry mails --all"),
        ),
        exits={1: "some were refused: a live job has the id", 4: "no such queue or job"},
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
        more="For jobs that are no longer dead in Redis. A second run within dedup_ttl changes nothing.",
        examples=(("see first what would be pushed", "recover /var/lib/forq/logs/mails/failed.jsonl --dry-run"),),
        exits={1: "some lines could not be used; they are named", 4: "no such queue"},
    ),
    Command(
        "remove",
        "jobs",
        "remove a job; one that runs is forgotten when it ends",
        NAME,
        ID,
        examples=(("", "remove mails 01JD0Z"),),
        exits={4: "no such queue, or it has no such job"},
    ),
    Command(
        "cancel",
        "jobs",
        "cancel a job that has not started",
        NAME,
        ID,
        examples=(("", "cancel mails 01JD0Z"),),
        exits={4: "no such queue, or it has no such job that waits"},
    ),
    Command(
        "pause",
        "queues",
        "start no more jobs of a queue",
        NAME,
        more="What runs goes on. It holds for all supervisors, and over restarts.",
        examples=(("", "pause mails"),),
        exits={4: "no such queue"},
    ),
    Command(
        "resume",
        "queues",
        "start jobs of a paused queue again",
        NAME,
        examples=(("", "resume mails"),),
        exits={4: "no such queue"},
    ),
    Command(
        "drain",
        "queues",
        "wait until a queue has nothing left to do",
        NAME,
        Argument("--wait", metavar="D", help="give up after this time (default: never)"),
        more="Jobs may still be pushed meanwhile. What is scheduled for later does not count.",
        examples=(("before an upgrade", "drain mails --wait 10m"),),
        exits={4: "no such queue", 6: "not drained within --wait; it goes on draining"},
    ),
    Command(
        "set",
        "queues",
        "change options of a queue, at once",
        NAME,
        Argument("options", nargs="+", metavar="OPTION=VALUE", help="an option"),
        more=(
            "For everything that is in the queue, too. Of a queue of the config file it holds until the "
            "supervisor restarts."
        ),
        examples=(("", "set mails timeout=2m max_retries=5"),),
        exits={4: "no such queue"},
    ),
    Command(
        "watch",
        "watch",
        "follow a job until it leaves the queue; exits with 1 if it failed for good",
        NAME,
        ID,
        Argument("--wait", metavar="D", help="give up after this time (default: never)"),
        examples=(("", "watch mails 01JD0Z --wait 5m"),),
        exits={
            1: "the job failed for good, or refused",
            4: "no such queue or job",
            6: "it is still there after --wait, or no answer in time",
        },
    ),
    Command(
        "why",
        "jobs",
        "say why a job is not running",
        NAME,
        ID,
        examples=(("", "why mails 01JD0Z"),),
        exits={4: "no such queue or job"},
    ),
    Command(
        "kill",
        "running",
        "end a job that is running; it is cancelled",
        NAME,
        ID,
        Argument("--retry", action="store_true", help="put it back in line instead, uncounted"),
        more="In the same way as a timeout does; the answer does not wait for the end.",
        examples=(("", "kill mails 01JD0Z --retry"),),
        exits={4: "no such queue, or no process of this supervisor runs the job"},
    ),
    Command(
        "stack",
        "running",
        "show where the running jobs of a queue are",
        NAME,
        more="The innermost frame comes first. It does the jobs no harm.",
        examples=(("", "stack mails"),),
        exits={4: "no such queue"},
    ),
    Command(
        "restart",
        "queues",
        "replace a queue's processes by new ones",
        NAME,
        more=("The running job ends first, within stop_grace. The new processes have the handler's code as it is now."),
        examples=(("after new code", "restart mails"),),
        exits={4: "no such queue"},
    ),
    Command(
        "ping",
        "supervisor",
        "ask whether the supervisor answers",
        examples=(("", "ping --timeout 2s"),),
    ),
    Command(
        "version",
        "supervisor",
        "show the versions of forqctl and the supervisor",
        examples=(("", "version --json"),),
    ),
    Command(
        "shutdown",
        "supervisor",
        "stop the supervisor",
        Argument("--now", action="store_true", help="without letting running jobs finish"),
        more="Running jobs get stop_grace to end; what has not ended goes back in line, uncounted.",
        examples=(("", "shutdown"),),
    ),
    Command(
        "completion",
        "completion",
        "print a script that completes forqctl's commands in a shell",
        Argument("shell", choices=("bash", "zsh", "fish"), help="the shell"),
        more="Needs no supervisor.",
        examples=(("for all users", "completion bash > /etc/bash_completion.d/forqctl"),),
    ),
)

BY_NAME = {command.name: command for command in COMMANDS}
