import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("forq", "0001_dead_job")]
    operations = [
        migrations.CreateModel(
            "OutboxEntry",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("key", models.CharField(editable=False, max_length=64, unique=True)),
                (
                    "state",
                    models.CharField(
                        choices=[("waiting", "waiting"), ("in doubt", "in doubt"), ("refused", "refused")],
                        default="waiting",
                        max_length=10,
                    ),
                ),
                ("task", models.CharField(max_length=200)),
                ("queue", models.CharField(max_length=64)),
                ("job_id", models.CharField(max_length=128, verbose_name="job id")),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now, verbose_name="created")),
                ("error", models.TextField(blank=True, default="")),
                ("body", models.BinaryField()),
                ("priority", models.SmallIntegerField()),
                ("token", models.CharField(max_length=128)),
                ("run_at", models.CharField(blank=True, default="", max_length=20)),
                ("options", models.TextField(blank=True, default="")),
                ("if_exists", models.CharField(default="update", max_length=10)),
                ("durable", models.CharField(blank=True, default="", max_length=10)),
                ("attempted_at", models.DateTimeField(blank=True, null=True, verbose_name="first attempt")),
                ("epoch", models.CharField(blank=True, default="", max_length=32)),
                ("until_ms", models.BigIntegerField(default=0)),
                ("marked_by", models.CharField(blank=True, default="", max_length=64)),
                ("attempt", models.CharField(blank=True, default="", max_length=64)),
            ],
            options={
                "verbose_name": "outbox entry",
                "verbose_name_plural": "outbox entries",
                "db_table": "forq_outbox",
                "indexes": [models.Index(fields=["state", "id"], name="forq_outbox_state")],
            },
        )
    ]
