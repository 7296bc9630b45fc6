from forq.contrib.django import app
from tests.support.django_project.orders.models import Receipt


@app.task(queue="mails")
def send_receipt(number: str) -> None:
    Receipt.objects.create(number=number)


@app.task
async def count_receipts() -> int:
    return await Receipt.objects.acount()
