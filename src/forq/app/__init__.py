"""The application side: tasks, their arguments and their results."""
