"""Captures the output of handlers: from the descriptors of a queue's process to the files of its queue, and back."""
