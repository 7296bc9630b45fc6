"""Maps each command of forqctl to the module that declares it."""

from __future__ import annotations

from forq.ctl.command import COMMANDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from forq.ctl.command import Command

# In the order of `forqctl --help`.
MODULES = {
    name: module
    for module, names in (
        ("queues", "create delete"),
        ("service", "status"),
        ("watch", "top"),
        ("jobs", "jobs job"),
        ("push", "push"),
        ("releases", "await dequeue ack"),
        ("schedules", "schedule schedules pause-schedule resume-schedule unschedule trigger"),
        ("jobs", "dead"),
        ("flows", "flow batch"),
        ("push", "recover"),
        ("jobs", "remove cancel run-now"),
        ("queues", "pause resume drain set"),
        ("watch", "watch logs"),
        ("jobs", "why kill stack"),
        ("queues", "restart"),
        ("apply", "apply"),
        ("service", "ping version shutdown completion"),
    )
    for name in names.split()
}


def command_named(name: str) -> Command:
    __import__(f"forq.ctl.commands.{MODULES[name]}")
    return COMMANDS[name]


def all_commands() -> list[Command]:
    return [command_named(name) for name in MODULES]
