"""Ids that never collide and sort by time (UUIDv7)."""

import os
import random
import time

# Not the module's own generator, which a user may seed. Seeded by the system; a forked process must not go on with the
# numbers of its parent.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


def new_id() -> str:
    """48 bits of milliseconds, version 7, 74 random bits, as 32 hex digits."""
    bits = _random.getrandbits(74)
    value = (time.time_ns() // 1_000_000) << 80 | 7 << 76 | (bits >> 62) << 64 | 2 << 62 | (bits & (1 << 62) - 1)
    return f"{value:032x}"
