"""Charts as SVG inside HTML, for the report of the pipeline and the dashboard. Standard library only.

Charts need charts.css, and charts.js for tooltips. They have no inline style and no inline script, so that a page may
forbid both (Content-Security-Policy). All text is escaped; tooltips are data attributes.
"""

from pathlib import Path

from forq.charts.hour import MinuteFigures, minutes_chart, waits_chart
from forq.charts.labels import count, duration, legend, short
from forq.charts.plots import Column, Series, heat_cells, log_lines, range_bars, stacked_areas
from forq.charts.sparkline import sparkline

STYLE = Path(__file__).with_name("charts.css")
SCRIPT = Path(__file__).with_name("charts.js")

__all__ = [
    "SCRIPT",
    "STYLE",
    "Column",
    "MinuteFigures",
    "Series",
    "count",
    "duration",
    "heat_cells",
    "legend",
    "log_lines",
    "minutes_chart",
    "range_bars",
    "short",
    "sparkline",
    "stacked_areas",
    "waits_chart",
]
