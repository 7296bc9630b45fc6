"""Finds queues that somebody has left half made or half deleted, so that they can be mended."""

from forq.broker.registry import Registry

# Nobody who is still at it takes so long.
LEFT_SECONDS = 30.0
LOOK_SECONDS = 30.0
LOOKED_AT_AT_ONCE = 200


class Halves:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._after = ""
        # Name -> its entry in the registry, and when it was first found like that.
        self._since: dict[str, tuple[str, float]] = {}

    def look(self, now: float) -> list[str]:
        """The names of those that have been like that for long, some at a time; of each again, until it is mended."""
        names = self._registry.names()
        found = self._registry.halves({name: names[name] for name in self._next(sorted(names)) if name in names})
        known = self._since
        self._since = {name: known[name] for name in known if name in names and name not in self._looked_at}
        for name, entry in found.items():
            before = known.get(name)
            self._since[name] = before if before is not None and before[0] == entry else (entry, now)
        return [name for name in found if now - self._since[name][1] >= LEFT_SECONDS]

    def _next(self, names: list[str]) -> set[str]:
        """In rotation, and those that are known to be halves."""
        later = [name for name in names if name > self._after] or names
        some = later[:LOOKED_AT_AT_ONCE]
        self._after = some[-1] if some else ""
        self._looked_at = {*some, *self._since}
        return self._looked_at
