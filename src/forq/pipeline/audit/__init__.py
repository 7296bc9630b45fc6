"""The audit: checks the events of history and journal against the rules of the state table and against Redis."""
