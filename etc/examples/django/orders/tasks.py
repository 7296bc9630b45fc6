from django.core.mail import send_mail
from django.utils import timezone

from forq import Permanent
from forq.contrib.django import app
from orders.models import Order


@app.task(queue="mails", timeout="30s", max_retries=5)
def confirm(order_id: int) -> None:
    """May run twice, after a crash: a second run changes nothing."""
    order = Order.objects.get(pk=order_id)
    if order.confirmed_at is not None:
        return
    if order.product == "unicorn":
        # Not retried: it becomes a dead job, which the admin shows.
        raise Permanent(f"order {order_id}: there are no unicorns")
    send_mail("Your order", f"Thank you for ordering: {order.product}", "shop@example.com", [order.email])
    order.confirmed_at = timezone.now()
    order.save(update_fields=["confirmed_at"])


@app.task(every="1h")
def report() -> None:
    print(f"{Order.objects.filter(confirmed_at=None).count()} orders wait for their confirmation")
