"""Reads charts as a browser would: the labels of their axes, and whether their markup is complete."""

import re
from html.parser import HTMLParser

# Of the 11.5 px of a label's font; digits have 0.56 em.
_CHARACTER_EM = 0.58
_VOID = ("meta", "br", "img")


def axes_in(page: str) -> list[str]:
    """The labels of each x axis, as SVG."""
    return re.findall(r'<div class="x"><svg [^>]*>(.*?)</svg>', page)


def labels_shown(axis: str, width_px: int) -> list[tuple[float, float]]:
    """Left and right edge, in px, of the labels that an axis of this width shows."""
    found = []
    for place, kinds, text in re.findall(r'<text x="([\d.]+)%" y="\d+"(?: class="([\w ]+)")?>([^<]*)</text>', axis):
        least = re.search(r"w(\d+)", kinds)
        if least is None or width_px >= int(least[1]):
            at, length = float(place) / 100 * width_px, len(text) * _CHARACTER_EM * 11.5
            before = 0.0 if "start" in kinds else 1.0 if "end" in kinds else 0.5
            found.append((at - before * length, at + (1 - before) * length))
    return found


class Markup(HTMLParser):
    """Fails on unbalanced tags; collects tags with their attributes, and the text."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[tuple[str, dict[str, str]]] = []
        self._open: list[str] = []
        self.feed(markup)
        self.close()
        assert self._open == []

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.tags if attribute in attributes]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
