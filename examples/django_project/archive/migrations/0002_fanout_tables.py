"""The tables of the fan-outs. After an upgrade of the library, add a migration like this one."""

from typing import Any

from django.db import migrations
from procrastinate.contrib.django import app

from fanout_procrastinate import FanOut


def apply_schema(apps: Any, schema_editor: Any) -> None:
    """Apply what is missing, on a connection of the library's own."""
    FanOut.of(app).apply_schema()


class Migration(migrations.Migration):
    """Create or upgrade them."""

    dependencies = [  # noqa: RUF012 - as Django has it
        ("archive", "0001_initial"),
        ("procrastinate", "0041_post_retry_failed_job"),  # the latest of those that are installed
    ]
    operations = [migrations.RunPython(apply_schema, migrations.RunPython.noop)]  # noqa: RUF012
