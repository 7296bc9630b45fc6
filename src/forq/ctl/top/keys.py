"""Keys out of the bytes that a terminal sends. A byte of escape may be a key or the beginning of one, so what is
incomplete waits for more, and `give_up` says that nothing follows."""

from __future__ import annotations

_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page_up",
    b"\x1b[6~": "page_down",
    b"\x1b[H": "home",
    b"\x1b[1~": "home",
    b"\x1bOH": "home",
    b"\x1b[F": "end",
    b"\x1b[4~": "end",
    b"\x1bOF": "end",
}
_SINGLE = {b"\r": "enter", b"\n": "enter", b"k": "up", b"j": "down", b"g": "home", b"G": "end"}


class Keys:
    def __init__(self) -> None:
        self._held = b""

    @property
    def incomplete(self) -> bool:
        return bool(self._held)

    def feed(self, data: bytes) -> list[str]:
        """The keys in it; what nobody uses is "" and does nothing."""
        self._held += data
        keys = []
        while self._held:
            length = _length(self._held)
            if length is None:
                break
            piece, self._held = self._held[:length], self._held[length:]
            keys.append(_named(piece))
        return keys

    def give_up(self) -> list[str]:
        alone, self._held = self._held == b"\x1b", b""
        return ["escape"] if alone else []


def _length(data: bytes) -> int | None:
    """How many bytes the first key has; None if more are needed to know."""
    if data[:1] != b"\x1b":
        return 1
    if len(data) == 1:
        return None
    if data[1:2] == b"O":
        return 3 if len(data) >= 3 else None
    if data[1:2] != b"[":
        # Escape, and then something else (or another escape).
        return 1
    for position in range(2, len(data)):
        if 0x40 <= data[position] <= 0x7E:
            return position + 1
    return None


def _named(piece: bytes) -> str:
    if piece == b"\x1b":
        return "escape"
    if len(piece) == 1:
        return _SINGLE.get(piece) or piece.decode("ascii", "ignore")
    return _SEQUENCES.get(piece, "")
