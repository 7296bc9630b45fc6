"""The bridge: producers and workers in any language, one JSON message per line (docs/guide/external-workers.md)."""

assert __name__ == "forq.bridge", "import this package as forq.bridge"
