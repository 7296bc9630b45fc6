from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    operations = [
        migrations.CreateModel(
            "Order",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("email", models.EmailField(max_length=254)),
                ("product", models.CharField(max_length=100)),
                ("confirmed_at", models.DateTimeField(editable=False, null=True)),
            ],
        ),
    ]
