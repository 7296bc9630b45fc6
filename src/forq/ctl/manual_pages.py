"""More words about each command, for its help and the man page: what the table of commands has no room for.

In a module of its own, which is loaded for help only: forqctl starts for every command, and is to start fast.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Page(NamedTuple):
    """`more` than the summary; `examples`: what for, and what to type after forqctl; `exits` that differ from EXITS."""

    more: str
    examples: tuple[tuple[str, str], ...]
    exits: dict[int, str]


PAGES = {
    "create": Page(
        (
            "The definition is kept in the state directory, and the queue is served again after a restart. With "
            "the same name and another definition the queue is replaced, with its jobs kept; its mode never "
            "changes."
        ),
        (
            (
                "a queue with a Python handler",
                "create mails --handler app.mails:send --path /srv/app --set timeout=30s",
            ),
            (
                "one whose handler is a program",
                "create video --handler 'exec:/usr/bin/node /srv/video.js' --set concurrency=2",
            ),
        ),
        {1: "refused: another mode, too many queues, or the config file defines it"},
    ),
    "delete": Page(
        "What the queue still held is in its failed log. All processes below its own are ended too.",
        (("drop a queue with all its jobs", "delete mails --force"),),
        {
            1: "it still holds jobs, and there is no --force",
            3: "it is deleted, but processes that its handlers have started cannot be killed",
            4: "no such queue",
        },
    ),
    "status": Page(
        ("Without Redis the processes are shown as usual, and counts are -. docs/operations.md explains every state."),
        (
            ("for monitoring", "status --check"),
            ("one queue, with its processes and first jobs", "status mails"),
        ),
        {3: "with --check: something is not healthy", 4: "no such queue"},
    ),
    "top": Page(
        (
            "On a terminal it is a screen: arrows or j and k move, enter shows one queue, p pauses, r resumes, s "
            "sorts, q or escape goes back or quits. It needs rich (pip install 'forq[top]'). Anywhere else, with "
            "--plain or TERM=dumb, it is a block of text each time; with --json an object per line. Rates are "
            "differences between two answers, so the first block has none."
        ),
        (
            ("a screen", "top"),
            ("a sample for a script", "top --json --count 2 --interval 5s"),
        ),
        {7: "no supervisor there at the start (later it is tried again)"},
    ),
    "jobs": Page(
        (
            "In the order in which they will run. Data is not shown: see job. If there are more, the command that "
            "shows them is on stderr, so that stdout has only rows."
        ),
        (("the first ten that wait", "jobs mails --state waiting --limit 10"),),
        {4: "no such queue"},
    ),
    "job": Page(
        (
            "With its data, its counts, and its last ten attempts that did not succeed. Of a job that the queue does "
            "not have (any more) it says what the queue's journal knows of it: when it was done or cancelled, or that "
            "it never was there."
        ),
        (("", "job mails 01JD0Z"),),
        {4: "no such queue, or no such job (any more): the message says what is known of it"},
    ),
    "push": Page(
        (
            "Prints the job's id, when it is stored. A job whose id is taken updates the one that is there, or "
            "waits behind it while it runs."
        ),
        (
            ("one job", 'push mails \'{"to": "a@b.c"}\''),
            ("tomorrow, and safe to repeat", "push mails '{}' --in 1d --token nightly-17"),
            ("one per line", "push mails --file mails.jsonl"),
        ),
        {
            1: "refused: the queue is full, the id is taken (--if-exists refuse), Redis is away or out of memory",
            4: "no such queue",
        },
    ),
    "await": Page(
        "",
        (("", "await crawl --wait 30s"),),
        {
            1: "refused, such as a queue of another mode",
            4: "no such queue",
            6: "nothing was released within --wait, or no answer in time",
        },
    ),
    "dequeue": Page(
        "",
        (
            ("take one and keep it", "dequeue orders"),
            ("take one for ten seconds, to be acknowledged", "dequeue orders --lease 10s"),
        ),
        {
            1: "refused, such as a queue of another mode",
            4: "no such queue",
            6: "there was no item within --wait, or no answer in time",
        },
    ),
    "ack": Page(
        "",
        (("", "ack orders o1 1794849575579031 01a1e55f129976bd"),),
        {1: "too late: the item has gone back in line", 4: "no such queue or item"},
    ),
    "schedule": Page(
        "With a key that is there the schedule is replaced; the same rule keeps its next time.",
        (
            ("every five minutes", 'schedule mails digest --every 5m --data \'{"kind": "digest"}\''),
            ("at half past two in Berlin", "schedule mails nightly --cron '30 2 * * *' --zone Europe/Berlin"),
        ),
        {4: "no such queue"},
    ),
    "schedules": Page(
        "",
        (("", "schedules mails nightly"),),
        {4: "no such queue or schedule"},
    ),
    "unschedule": Page(
        "",
        (("", "unschedule mails nightly"),),
        {4: "no such queue or schedule"},
    ),
    "trigger": Page(
        "",
        (("", "trigger mails nightly"),),
        {4: "no such queue or schedule"},
    ),
    "dead": Page(
        "A dead job failed for good. retry puts it in line again with all counts 0; discard forgets it.",
        (
            ("the newest", "dead list mails --limit 10"),
            ("error, attempts and traceback of one", "dead show mails 01JD0Z"),
            ("all of them again", "dead retry mails --all"),
        ),
        {1: "some were refused: a live job has the id", 4: "no such queue or job"},
    ),
    "recover": Page(
        "For jobs that are no longer dead in Redis. A second run within dedup_ttl pushes only lines that were left.",
        (("see first what would be pushed", "recover /var/lib/forq/logs/mails/failed.jsonl --dry-run"),),
        {
            1: "some lines could not be used, or were left because a live job has their id; they are named",
            4: "no such queue",
        },
    ),
    "remove": Page(
        "",
        (("", "remove mails 01JD0Z"),),
        {4: "no such queue, or it has no such job"},
    ),
    "cancel": Page(
        "",
        (("", "cancel mails 01JD0Z"),),
        {4: "no such queue, or it has no such job that waits"},
    ),
    "pause": Page(
        "What runs goes on. It holds for all supervisors, and over restarts.",
        (("", "pause mails"),),
        {4: "no such queue"},
    ),
    "resume": Page(
        "",
        (("", "resume mails"),),
        {4: "no such queue"},
    ),
    "drain": Page(
        "Jobs may still be pushed meanwhile. What is scheduled for later does not count.",
        (("before an upgrade", "drain mails --wait 10m"),),
        {4: "no such queue", 6: "not drained within --wait; it goes on draining"},
    ),
    "set": Page(
        (
            "For everything that is in the queue, too. Of a queue of the config file it holds until the "
            "supervisor restarts."
        ),
        (("", "set mails timeout=2m max_retries=5"),),
        {4: "no such queue"},
    ),
    "watch": Page(
        "",
        (("", "watch mails 01JD0Z --wait 5m"),),
        {
            1: "the job failed for good, or refused",
            4: "no such queue or job",
            6: "it is still there after --wait, or no answer in time",
        },
    ),
    "logs": Page(
        "What was written before the files were rotated twice (log_max) is gone; what was left out of a flood is said.",
        (("", "logs mails -n 20"), ("follow one job", "logs mails -f --job 01JD0Z")),
        {4: "nothing was ever kept of a queue of that name"},
    ),
    "why": Page(
        "Of a job that the queue does not have (any more) it says what the queue's journal knows of it.",
        (("", "why mails 01JD0Z"),),
        {4: "no such queue, or no such job (any more): the message says what is known of it"},
    ),
    "kill": Page(
        "In the same way as a timeout does; the answer does not wait for the end.",
        (("", "kill mails 01JD0Z --retry"),),
        {4: "no such queue, or no process of this supervisor runs the job"},
    ),
    "stack": Page(
        "The innermost frame comes first. It does the jobs no harm.",
        (("", "stack mails"),),
        {4: "no such queue"},
    ),
    "restart": Page(
        ("The running job ends first, within stop_grace. The new processes have the handler's code as it is now."),
        (("after new code", "restart mails"),),
        {4: "no such queue"},
    ),
    "ping": Page(
        "",
        (("", "ping --timeout 2s"),),
        {},
    ),
    "version": Page(
        "",
        (("", "version --json"),),
        {},
    ),
    "shutdown": Page(
        (
            "Running jobs get stop_grace to end; what has not ended goes back in line, uncounted. While it waits it "
            "says on stderr for which jobs. Ctrl-C ends only the waiting."
        ),
        (("", "shutdown"),),
        {6: "it has not stopped within --timeout; it goes on stopping"},
    ),
    "completion": Page(
        "Needs no supervisor.",
        (("for all users", "completion bash > /etc/bash_completion.d/forqctl"),),
        {},
    ),
}
