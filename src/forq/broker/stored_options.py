"""Which of a queue's options scripts need, and how Redis holds them (integers; durations in ms). No code paths."""

from collections.abc import Mapping

from forq.durations import show_duration
from forq.options import WORK, Value, defaults, fixed_options
from forq.rates import parse_rate

_AS_IS = (
    *("max_items", "max_data", "max_retries", "max_stalls", "max_timeouts", "retry_lane_retries", "jitter"),
    *("size", "priority", "dead_max", "done_max", "journal", "journal_max", "release_retries", "burst", "max_active"),
)
_AS_MS = (
    *("timeout", "min_backoff", "max_backoff", "dead_ttl", "dedup_ttl", "keep_done"),
    *("release_interval", "retry_interval", "lease", "item_timeout"),
)


def stored(options: Mapping[str, Value]) -> dict[str, int]:
    """The part of `options` that Redis holds."""
    kept = {name: int(options[name]) for name in _AS_IS if name in options}
    kept |= {f"{name}_ms": round(float(options[name]) * 1000) for name in _AS_MS if name in options}
    if "rate" in options:
        rate = parse_rate(options["rate"])
        kept |= {"rate_count": rate.count, "rate_ms": round(rate.seconds * 1000)}
    return kept


def stored_for_fail_queue(options: Mapping[str, Value]) -> dict[str, int]:
    """The options of a queue's fail queue: fail_max_retries is its max_retries, and so on. It has no limits of its own:
    what failed for good must be stored."""
    return changed_for_fail_queue(options) | {"max_items": 0, "max_data": 2**40, "retry_lane_retries": 0}


def changed_for_fail_queue(options: Mapping[str, Value]) -> dict[str, int]:
    """Those of `options` that concern the fail queue, under its own names.

    A fail handler that hangs or kills its process is tried as often as one that raises.
    """
    own = {name.removeprefix("fail_"): value for name, value in options.items() if name.startswith("fail_")}
    if "max_retries" in own:
        own["max_stalls"] = own["max_timeouts"] = own["max_retries"]
    if "priority" in options:
        own["priority"] = options["priority"]
    return stored(own)


def stored_defaults(mode: str = WORK) -> dict[str, int]:
    return stored(defaults(mode))


def stored_fixed(mode: str) -> frozenset[str]:
    """The names, as Redis has them, of what is fixed for the life of a queue of this mode."""
    return frozenset(stored({name: defaults(mode)[name] for name in fixed_options(mode)}))


def shown_option(name: str, value: str) -> str:
    """An option as Redis holds it, as people write it."""
    if name.endswith("_ms"):
        return f"{name.removesuffix('_ms')} = {show_duration(int(value) / 1000)}"
    return f"{name} = {value}"
