"""Jobs in memory inside Django's TestCase: tasks see the rows of the test (docs/guide/testing.md)."""

import unittest

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.test import TestCase

from forq import testing
from forq.contrib.django.project import project_app


class TasksInTestCase(TestCase):
    # Not by pytest itself.
    __test__ = False

    def setUp(self) -> None:
        from tests.support.django_project.orders.models import Receipt
        from tests.support.django_project.orders.tasks import count_receipts, send_receipt

        self.memory = self.enterContext(testing.memory(project_app()))
        self.send, self.count, self.receipts = send_receipt, count_receipts, Receipt.objects
        self.receipts.create(number="1")

    def test_sync_task(self) -> None:
        self.send.enqueue("2")
        self.memory.run_all()
        assert self.receipts.count() == 2

    def test_async_task(self) -> None:
        ref = self.count.enqueue()
        async_to_sync(self.memory.arun_all)()
        assert ref.result() == 1

    async def test_sync_task_in_async_test(self) -> None:
        await self.send.aenqueue("2")
        await sync_to_async(self.memory.run_all)()
        assert await self.receipts.acount() == 2

    async def test_async_task_in_async_test(self) -> None:
        ref = await self.count.aenqueue()
        await self.memory.arun_all()
        assert await ref.aresult() == 1


@pytest.mark.parametrize("name", [name for name in vars(TasksInTestCase) if name.startswith("test_")])
def test_a_task_uses_the_connection_of_the_test(project: None, name: str) -> None:
    result = unittest.TestSuite([TasksInTestCase(name)]).run(unittest.TestResult())
    assert result.testsRun == 1
    assert result.errors + result.failures == []
