from django.db import models


class Order(models.Model):
    email: "models.CharField[str, str]" = models.EmailField()
    product: "models.CharField[str, str]" = models.CharField(max_length=100)
    confirmed_at = models.DateTimeField(null=True, editable=False)

    def __str__(self) -> str:
        return f"{self.product} for {self.email}"
