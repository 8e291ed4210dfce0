"""The tables of this app."""

import django.db.models.deletion
from django.db import migrations, models

ID = (
    "id",
    models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID"),
)


class Migration(migrations.Migration):
    """Create them."""

    initial = True
    dependencies: list[tuple[str, str]] = []  # noqa: RUF012 - as Django has it
    operations = [  # noqa: RUF012
        migrations.CreateModel(
            name="Batch",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        primary_key=True, serialize=False, auto_created=True, verbose_name="ID"
                    ),
                ),
                ("name", models.CharField(max_length=200)),
                ("run_id", models.BigIntegerField(null=True)),
            ],
        ),
        migrations.CreateModel(
            name="Document",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        primary_key=True, serialize=False, auto_created=True, verbose_name="ID"
                    ),
                ),
                ("title", models.CharField(max_length=200)),
                ("text", models.TextField()),
                ("words", models.IntegerField(null=True)),
                (
                    "batch",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="documents",
                        to="archive.batch",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("batch", "title"), name="title_once_in_a_batch")
                ],
            },
        ),
    ]
