"""Creates the queues of an app in Redis, for producers that start before any supervisor.

Options of a queue that exists never change here. Creating a queue several times at once is harmless.
"""

from collections.abc import Mapping

from forq.broker.link import CallNotAllowed
from forq.broker.registry import Registry
from forq.client import DEFAULT_MAX_QUEUES, Client
from forq.errors import UnknownQueue
from forq.settings import WORK, Value, parse_options, stored, stored_defaults


def create_if_never_deleted(client: Client, name: str, options: Mapping[str, Value], command: str) -> None:
    """For producers: UnknownQueue if the queue was deleted within the last days. `command` creates it nevertheless."""
    try:
        registry = Registry(client.link(), client.prefix)
        if registry.was_deleted(name):
            raise UnknownQueue(f"queue {name!r} was deleted; to create it again: {command}")
        # `reopening` refuses a queue that is deleted from now on.
        _create(registry, name, options, reopening=True)
    except CallNotAllowed as exc:
        raise UnknownQueue(
            f"there is no queue {name!r}, and this user of Redis may not create it; start a supervisor that serves it, "
            f"or run with a user that may: {command} ({exc})"
        ) from exc


def create_absent(client: Client, name: str, options: Mapping[str, Value]) -> bool:
    """True if the queue was created, False if it exists. Also creates a queue that was deleted."""
    return _create(Registry(client.link(), client.prefix), name, options, reopening=False)


def _create(registry: Registry, name: str, options: Mapping[str, Value], *, reopening: bool) -> bool:
    given = stored(parse_options(options, f"queue {name!r}", WORK))
    # As defaults: unlike options, they are left alone if another client creates the queue meanwhile.
    return registry.create(name, WORK, DEFAULT_MAX_QUEUES, stored_defaults(WORK) | given, {}, reopening=reopening)
