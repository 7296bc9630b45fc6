"""Spark looks for modules of this name: so format("forq") is there wherever forq[pipeline] is installed."""

from forq.pipeline.source import ForqSource as DefaultSource

__all__ = ["DefaultSource"]
