"""Which of a queue's options scripts need, and how Redis holds them (integers; durations in ms). No code paths."""

from collections.abc import Mapping

from forq.options import Value, defaults

_AS_IS = ("max_items", "max_data", "max_retries", "jitter", "dead_max", "journal", "journal_max")
_AS_MS = ("min_backoff", "max_backoff", "dead_ttl", "dedup_ttl")


def stored(options: Mapping[str, Value]) -> dict[str, int]:
    """The part of `options` that Redis holds."""
    kept = {name: int(options[name]) for name in _AS_IS if name in options}
    return kept | {f"{name}_ms": int(options[name] * 1000) for name in _AS_MS if name in options}


def stored_defaults() -> dict[str, int]:
    return stored(defaults())
