"""A handler that computes in pure Python."""

from typing import Any


def burn(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total = (total * 31 + number) & 0xFFFFFFFF
    return total


def handle(data: Any, job: Any) -> None:
    burn(data)
