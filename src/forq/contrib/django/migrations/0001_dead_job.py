from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    operations = [
        migrations.CreateModel(
            "DeadJob",
            [("reference", models.CharField(max_length=240, primary_key=True, serialize=False))],
            options={
                "managed": False,
                "base_manager_name": "objects",
                "verbose_name": "dead job",
                "default_permissions": ("view", "change", "delete"),
            },
        ),
    ]
