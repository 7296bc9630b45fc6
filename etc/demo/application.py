"""The application of the tour: what enqueues jobs. It could be a view of a web site; here it is a program."""

from forq import Client

greetings = Client().queue("greetings")

greetings.enqueue({"name": "world"}, id="first")
greetings.enqueue_many({"name": f"number {number}"} for number in range(1000))
print("enqueued 1001 jobs")
