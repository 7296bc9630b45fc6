import forq

app = forq.App("greetings")


@app.task
def greet(name: str) -> str:
    return f"hello, {name}"


if __name__ == "__main__":
    print(greet.enqueue("world").result(timeout=30))
