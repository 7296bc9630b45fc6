"""The warden, as the supervisor sees it: which processes of queues it watches, and whose trees it kills.

It is started when it is needed for the first time.
"""

from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

from forq.procs.cgroups import Exceeded, Resources
from forq.supervisor.service import Service


class Restrained(Protocol):
    """A process of a queue, as the watch knows it."""

    slots: tuple[int, ...]
    resources: Resources

    @property
    def pid(self) -> int: ...

    def exceed(self, how: Exceeded) -> None: ...


class ResourceWatch:
    def __init__(self, make_warden: Callable[..., Service]) -> None:
        self._warden = make_warden(on_event=self._heard, on_start=self._tell, needed=lambda: bool(self._watched))
        self._started = False
        self._keys = count(1)
        self._watched: dict[int, Restrained] = {}

    @property
    def services(self) -> tuple[Service, ...]:
        return (self._warden,) if self._started else ()

    def add(self, process: Restrained) -> None:
        self._watched[next(self._keys)] = process
        if self._started:
            self._tell()
        else:
            self._start()

    def _start(self) -> None:
        self._started = True
        self._warden.start()

    def ask(self, verb: str, params: dict[str, Any], answer: Callable[[Any], None]) -> bool:
        """False: there is no warden to ask at this moment."""
        if not self._started:
            self._start()
        if self._warden.child is None or self._warden.child.stopping:
            return False
        self._warden.ask(verb, params, answer)
        return True

    def remove(self, process: Restrained) -> None:
        keys = [key for key, watched in self._watched.items() if watched is process]
        for key in keys:
            del self._watched[key]
        if keys:
            self._tell()

    def _tell(self) -> None:
        processes = [
            {
                "key": key,
                "pid": process.pid,
                "slots": process.slots,
                "memory_bytes": process.resources.memory_bytes,
                "tasks": process.resources.tasks,
            }
            for key, process in self._watched.items()
        ]
        self._warden.ask("watch", {"processes": processes})

    def _heard(self, message: dict[str, Any]) -> None:
        process = self._watched.get(message["key"])
        # It may have ended on its own meanwhile.
        if process is not None:
            process.exceed(Exceeded(message["cause"], message["peak"]))
