from django import forms
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render

from orders.models import Order
from orders.tasks import confirm


class OrderForm(forms.ModelForm):
    class Meta:
        model = Order
        fields = ("email", "product")


def order_form(request: HttpRequest) -> HttpResponse:
    form = OrderForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        with transaction.atomic():
            order = form.save()
            # Not before the commit: a worker could look for the order too early.
            confirm.using(on_commit="default").enqueue(order.pk)
        return redirect("order", order.pk)
    return render(request, "orders/order_form.html", {"form": form})


def order_page(request: HttpRequest, pk: int) -> HttpResponse:
    return render(request, "orders/order.html", {"order": get_object_or_404(Order, pk=pk)})
