# worker.py
from collections.abc import Iterator

from tasks import app
from web import create_app

import forq

flask_app = create_app()


@app.around
def in_app_context(job: forq.Job) -> Iterator[None]:
    with flask_app.app_context():
        yield
