"""The capture of what handlers print and log: from the descriptors of a process to the files of its queue, and back."""
