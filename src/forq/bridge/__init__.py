"""The bridge: producers and workers in any language exchange one JSON message per line (docs/reference/bridge.md)."""

assert __name__ == "forq.bridge", "import this package as forq.bridge"
