"""Ids that never collide and sort by time (UUIDv7)."""

import os
import time


def new_id() -> str:
    """48 bits of milliseconds, version 7, 74 random bits, as 32 hex digits."""
    random = int.from_bytes(os.urandom(10), "big")
    value = (time.time_ns() // 1_000_000) << 80 | 7 << 76 | (random >> 68) << 64 | 2 << 62 | (random & (1 << 62) - 1)
    return f"{value:032x}"
