"""Draws results.json: drain rates and pickup times of all peers, on logarithmic scales.

    python benchmarks/chart.py RESULTS.json CHART.png

Runs in its own environment with matplotlib (installing.py); compare.py starts it.
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

OURS, OTHERS = "#c8451b", "#8a94a6"
PANELS = (
    ("Jobs per second, one worker process", "drain", "per_second", True),
    ("Pickup by an idle worker, p99 in ms", "pickup", "p99_ms", False),
    ("Runs again after its process was killed, s", "crash_process", "seconds", False),
)


def main() -> None:
    with open(sys.argv[1]) as file:
        results = json.load(file)
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(13, 0.9 + 0.3 * len(results["peers"])))
    for axis, (title, measure, name, more_is_better) in zip(axes, PANELS, strict=True):
        panel(axis, results, title, measure, name, more_is_better)
    machine = results["machine"]
    figure.text(0.01, 0.01, f"{machine['cores']} cores, {results['server']}; logarithmic", fontsize=7, color="#666")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(sys.argv[2], dpi=120)


def panel(axis, results, title, measure, name, more_is_better):
    """A bar per peer, the best on top; a peer without a figure gets a dash."""
    found = {peer: results["summaries"].get(peer, {}).get(measure, {}).get(name) for peer in results["peers"]}
    known = sorted((p for p in found if found[p]), key=lambda p: found[p], reverse=not more_is_better)
    order = [peer for peer in found if not found[peer]] + known
    values = [found[peer] or 0 for peer in order]
    axis.barh(order, values, color=[OURS if peer == "forq" else OTHERS for peer in order])
    axis.set_title(title, fontsize=10, loc="left")
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.set_xticks([])
    if known:
        axis.set_xscale("log")
        least, most = min(found[peer] for peer in known), max(found[peer] for peer in known)
        axis.set_xlim(least / 3, most * 6)
        axis.set_xticks([], minor=True)
        axis.set_xticks([])
    # Without a figure: it was not measured, it failed, or its job did not run again in time.
    ended = {peer for peer in found if "rounds" in results["summaries"].get(peer, {}).get(measure, {})}
    late = f"not within {results['crash_cap_seconds']:.0f} s"
    for row, peer in enumerate(order):
        value = found[peer]
        label = (
            f"{value:,.0f}" if value and value >= 100 else f"{value:.3g}" if value else late if peer in ended else "-"
        )
        axis.annotate(f" {label}", (value or axis.get_xlim()[0], row), va="center", fontsize=8)


if __name__ == "__main__":
    main()
