"""Which of the 16,384 slots of a Redis Cluster a key is in."""

from binascii import crc_hqx

SLOTS = 16_384


def slot_of(key: str) -> int:
    """All keys with the same {tag} are in one slot; a key without one is its own tag."""
    tag = key.partition("{")[2].partition("}")[0] if "}" in key.partition("{")[2] else ""
    return crc_hqx((tag or key).encode(), 0) % SLOTS
