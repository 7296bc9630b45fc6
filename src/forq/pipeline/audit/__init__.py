"""Checks the journal and the history against each other and against Redis."""
