"""The application of the tour, which enqueues jobs. In practice this is often a view of a web site."""

from forq import Client

greetings = Client().queue("greetings")

greetings.enqueue({"name": "world"}, id="first")
greetings.enqueue_many({"name": f"number {number}"} for number in range(1000))
print("enqueued 1001 jobs")
