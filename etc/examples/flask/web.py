# web.py
from decimal import Decimal
from typing import Any

from flask import Flask, request
from tasks import bill

from forq.errors import JobDead, RedisUnavailable


def create_app() -> Flask:
    web = Flask(__name__)
    web.config.from_mapping(SHOP="The shop", CURRENCY="EUR")
    web.config.from_prefixed_env()

    @web.post("/orders/<number>")
    def order(number: str) -> tuple[dict[str, Any], int]:
        prices = [Decimal(price) for price in request.get_json()]
        ref = bill.using(token=number).enqueue(number, prices)
        return {"job": ref.id}, 202

    @web.get("/jobs/<job>")
    def result(job: str) -> tuple[dict[str, Any], int]:
        ref = bill.ref(job)
        state = ref.state()
        if state == "gone":
            return {"error": "no such job, or its result is no longer kept"}, 404
        if state not in ("done", "dead"):
            return {"state": state}, 202
        try:
            return {"state": state, "result": ref.result(timeout=1)}, 200
        except JobDead:
            return {"state": state, "error": "the order cannot be billed"}, 500

    @web.errorhandler(RedisUnavailable)
    def try_again(error: RedisUnavailable) -> tuple[dict[str, Any], int, dict[str, str]]:
        web.logger.warning("%s: %s", type(error).__name__, error)
        return {"error": "try again"}, 503, {"Retry-After": "1"}

    return web
