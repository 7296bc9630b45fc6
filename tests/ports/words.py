"""Fetches a page, parses it, processes 20 parts of it in parallel, and merges their results in order.
words_in_celery.txt does the same with Celery."""

import forq

app = forq.App("words")


@app.task
def fetch(url: str) -> str:
    return f"text of {url}"


@app.task
def parse(page: str) -> list[str]:
    return page.split()


@app.task
def process(words: list[str], number: int) -> str:
    return f"{words[number % len(words)]} {number}"


@app.task
def merge(parts: list[str]) -> str:
    return ", ".join(parts)


def main() -> None:
    with app.flow() as flow:
        words = flow.then(parse, flow.add(fetch.prepare("a.example")))
        merged = flow.join(merge, [flow.then(process, words, number) for number in range(20)])
    print(merged.ref.result(timeout=30))


if __name__ == "__main__":
    main()
