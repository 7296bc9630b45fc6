from django.contrib import admin
from django.urls import path
from orders import views

urlpatterns = [
    path("", views.order_form, name="order-form"),
    path("orders/<int:pk>/", views.order_page, name="order"),
    path("admin/", admin.site.urls),
]
