"""The report: one HTML page about the events of a history."""
