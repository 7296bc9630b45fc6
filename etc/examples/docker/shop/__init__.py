"""A shop in containers: tasks for the worker, and a web application that enqueues them."""
