"""The examples of docs/guide/django-outbox.md, run in the test project."""

import unittest
from typing import Any

import pytest
from django.db import transaction
from django.test import TestCase

from forq.contrib.django.project import make_app, project_app
from tests.docs.pages import ROOT, Block, blocks
from tests.support.drive.outbox import order, rows, waiting_ids

WAYS, SETTINGS, DELIVERY, STATUS, USERS_TEST = [
    block for block in blocks(ROOT / "docs/guide/django-outbox.md") if block.language == "python"
]


def execute(block: Block, **names: object) -> dict[str, Any]:
    exec(compile(block.text, str(block), "exec"), names)
    return names


@pytest.fixture
def names(project: None) -> dict[str, Any]:
    from tests.support.django_project.orders.models import Order
    from tests.support.django_project.orders.tasks import send_receipt

    project_app().create_queue("mails")
    return {"transaction": transaction, "Order": Order, "send_receipt": send_receipt}


def test_the_three_ways(names: dict[str, Any]) -> None:
    execute(WAYS, **names)
    assert len(waiting_ids()) == 3


def test_the_settings(project: None) -> None:
    app = make_app(execute(SETTINGS)["FORQ"])
    assert app.outbox("default").alias == "default"


def test_delivery_and_status(names: dict[str, Any]) -> None:
    execute(DELIVERY)
    execute(STATUS)
    assert rows("default") == []


def test_a_test_of_a_user(names: dict[str, Any]) -> None:
    from forq.contrib.django.models import OutboxEntry

    place_order = lambda number: order("default", number)  # noqa: E731
    made = execute(USERS_TEST, TestCase=TestCase, OutboxEntry=OutboxEntry, place_order=place_order, __name__=__name__)
    result = unittest.TestSuite([made["OrderTest"]("test_receipt")]).run(unittest.TestResult())
    assert (result.testsRun, result.errors, result.failures) == (1, [], [])
    assert len(waiting_ids()) == 1
