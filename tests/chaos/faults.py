"""The table of all faults: frequency per minute and function; and which of them have fired."""

from functools import partial

from tests.chaos.crash_points import CRASH_POINTS
from tests.chaos.ground import lines
from tests.chaos.hit import Fault
from tests.chaos.link_faults import LINKS, cut, delay, drop_reply, freeze_link, half_open, late_request, refused_late
from tests.chaos.process_faults import (
    crash_at,
    freeze_child,
    freeze_service,
    kill_child,
    kill_job,
    kill_producer,
    kill_service,
    kill_supervisor,
    partition,
    restart_queue,
    zombie,
)
from tests.chaos.producer import MISDEEDS
from tests.chaos.server_faults import (
    cancel,
    client_kill,
    forget_scripts,
    freeze_redis,
    kill_redis,
    out_of_memory,
    pause,
)
from tests.chaos.stage import Stage

FAULTS: dict[str, tuple[float, Fault]] = {
    "kill_child": (40, kill_child),
    "kill_job": (30, kill_job),
    "restart_queue": (20, restart_queue),
    "kill_pulse": (6, partial(kill_service, "pulse")),
    "kill_clerk": (4, partial(kill_service, "clerk")),
    "kill_scribe": (4, partial(kill_service, "scribe")),
    "kill_producer": (3, kill_producer),
    "kill_supervisor": (4, kill_supervisor),
    "freeze_child": (6, freeze_child),
    "freeze_service": (5, freeze_service),
    "zombie": (4, zombie),
    "partition": (2, partition),
    "kill_redis": (3, kill_redis),
    "freeze_redis": (3, freeze_redis),
    "client_kill": (6, client_kill),
    "script_flush": (6, partial(forget_scripts, "SCRIPT")),
    "function_flush": (6, partial(forget_scripts, "FUNCTION")),
    "out_of_memory": (4, out_of_memory),
    "pause": (5, pause),
    "cancel": (90, cancel),
    "drop_reply": (60, drop_reply),
    "late_request": (20, late_request),
    "cut": (6, cut),
    "delay": (4, delay),
    "freeze_link": (4, freeze_link),
    "half_open": (3, half_open),
    **{f"crash_{point}": (6.0, partial(crash_at, point)) for point in CRASH_POINTS},
}
# Faults that jobs carry: `fired` reads them from the trace.
HANDLER_FAULTS = tuple(f"handler_{what}" for what in MISDEEDS)
ALL_FAULTS = (*FAULTS, *HANDLER_FAULTS)


def fired(stage: Stage, struck: dict[str, list[str]]) -> dict[str, list[str]]:
    """What each fault has hit, from the nemesis or, where that only armed it, from the evidence."""
    found = {name: list(hits) for name, hits in struck.items()}
    if "drop_reply" in found:
        found["drop_reply"] = [
            link for link, proxy in zip(LINKS, stage.proxies, strict=True) for _ in range(proxy.dropped)
        ]
    if "late_request" in found:
        workers = [f"a worker of {link}" for link in LINKS]
        found["late_request"] = [
            whom for whom, proxy in zip(workers, stage.proxies, strict=True) for _ in range(refused_late(proxy))
        ]
    crashed = [words[0] for words in lines(stage.ground.crashed)]
    for point, whom in CRASH_POINTS.items():
        if f"crash_{point}" in found:
            found[f"crash_{point}"] = [whom] * crashed.count(point)
    done = [words[4] for words in lines(stage.ground.trace)]
    for name in set(HANDLER_FAULTS) & set(found):
        what = name.removeprefix("handler_")
        found[name] = ["a handler"] * done.count(what)
    return found
