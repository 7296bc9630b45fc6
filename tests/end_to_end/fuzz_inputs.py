"""Invalid lines: valid requests, mutated ones, and noise. A seed repeats them."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_LINE = 1 << 20
# Values that parsers tend to get wrong.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**64, -(2**63), 0.1, 1e308),
    *("", " ", "a" * 200, "9" * 400, "\x00", "\x1b[31m", "ä€\U0001f600", "{", "}", "__class__"),
    *("../../etc/passwd", "q\r\nDEL x", [], {}, [[]], {"": 0}, [None] * 50),
)
RAW = (
    *(b"", b" ", b"\r", b"\x00", b"[]", b"{}", b"null", b"true", b'"', b"{", b"}", b"[", b"]", b","),
    *(b"NaN", b"-Infinity", b"1e999", b"-", b"0x10", b'{"a":1,"a":2}', b"{'a': 1}"),
    *(b'"\\ud800"', b'"\\u0000"', b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf{}"),
    *(b"\x1e{}", b"\x1b[2J", b"GET / HTTP/1.1\r", b"*1\r", b"\x80\x04N."),
)


class Inputs:
    """`requests`: method -> example params. `wrap`: makes a message of both, as an object."""

    def __init__(
        self,
        seed: int,
        requests: Mapping[str, Mapping[str, Any]],
        wrap: Callable[[str, Any, random.Random], dict[str, Any]],
    ) -> None:
        self._random = random.Random(seed)
        self._requests = requests
        self._names = list(requests)
        self._wrap = wrap
        # The frequency of each kind, out of 1,000.
        kinds: Sequence[tuple[int, Callable[[], bytes]]] = (
            (150, self._valid),
            (350, self._with_odd_values),
            (300, self._with_broken_bytes),
            (100, self._raw),
            (60, self._noise),
            (30, self._nested),
            (9, self._long),
            (1, self._too_long),
        )
        self._kinds = [kind for _, kind in kinds]
        self._weights = [weight for weight, _ in kinds]

    def lines(self, count: int) -> list[bytes]:
        """`count` lines, each with its newline."""
        return [kind() + b"\n" for kind in self._random.choices(self._kinds, self._weights, k=count)]

    def _valid(self) -> bytes:
        name = self._random.choice(self._names)
        return _encode(self._wrap(name, dict(self._requests[name]), self._random))

    def _with_odd_values(self) -> bytes:
        pick = self._random.choice
        name = pick(self._names)
        params = dict(self._requests[name])
        for _ in range(self._random.randint(1, 3)):
            params[pick([*params, "extra", ""])] = pick(ODD)
        message = self._wrap(name, params, self._random)
        if self._random.random() < 0.3:
            message[pick([*message, "x"])] = pick(ODD)
        if self._random.random() < 0.1:
            del message[pick(list(message))]
        return _encode(message)

    def _with_broken_bytes(self) -> bytes:
        line = bytearray(self._valid())
        for _ in range(self._random.randint(1, 4)):
            at = self._random.randrange(len(line) + 1)
            how = self._random.randrange(4)
            if how == 0 and line:
                line[at % len(line)] = self._random.randrange(256)
            elif how == 1:
                line[at:at] = self._random.choice(RAW)
            elif how == 2:
                del line[at : at + self._random.randint(1, 8)]
            else:
                line[at:at] = line[: self._random.randint(1, 20)]
        return bytes(line).replace(b"\n", b" ")

    def _raw(self) -> bytes:
        return b"".join(self._random.choices(RAW, k=self._random.randint(1, 4))).replace(b"\n", b" ")

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.randint(1, 200)).replace(b"\n", b" ")

    def _nested(self) -> bytes:
        depth = self._random.choice((10, 500, 2000, 20_000))
        opening, closing = self._random.choice(((b"[", b"]"), (b'{"a":', b"}")))
        inner = opening * depth + b"0" + closing * self._random.choice((depth, depth - 1, 0))
        if self._random.random() < 0.5:
            return inner
        name = self._random.choice(self._names)
        marked = _encode(self._wrap(name, {**self._requests[name], "data": "@@"}, self._random))
        return marked.replace(b'"@@"', inner)

    def _long(self) -> bytes:
        name = self._random.choice(self._names)
        text = self._random.choice(("x", "ä", "\\", '"')) * self._random.randint(1000, 30_000)
        key = self._random.choice([*self._requests[name], "name", "id"])
        return _encode(self._wrap(name, {**self._requests[name], key: text}, self._random))

    def _too_long(self) -> bytes:
        return b"x" * (MAX_LINE + self._random.randint(1, 5000))


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()
