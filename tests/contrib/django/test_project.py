"""The app of a Django project: its settings, and the names and places of its tasks."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from forq.contrib.django.project import discover_tasks, make_app, project_app


def test_tasks_of_installed_apps_are_found_and_named_after_their_app(project: None) -> None:
    discover_tasks()
    tasks = project_app().tasks
    assert sorted(tasks) == ["forq.deliver_outbox", "orders.count_receipts", "orders.send_receipt"]
    assert (tasks["orders.send_receipt"].queue, tasks["orders.count_receipts"].queue) == ("mails", "shop")


def test_a_function_outside_of_installed_apps_keeps_its_plain_name(project: None) -> None:
    assert (
        project_app()
        ._default_name(test_tasks_of_installed_apps_are_found_and_named_after_their_app)
        .startswith("test_tasks")
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"NAMES": "shop"}, "FORQ has no key 'NAMES'.*NAME"),
        ({"NAME": "a b"}, "FORQ: "),
        ({"QUEUES": ["mails"]}, "options by queue"),
        ({"QUEUES": {"mails": {"concurency": 2}}}, "concurrency"),
        ({"TIMEOUT": "long"}, "FORQ: timeout"),
        ("shop", "a dict with NAME"),
    ],
)
def test_invalid_settings_are_refused(project: None, given: object, message: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=message):
        make_app(given)  # type: ignore[arg-type]
