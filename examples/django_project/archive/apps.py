"""Tell Django of this app."""

from django.apps import AppConfig


class ArchiveConfig(AppConfig):
    """Batches of documents."""

    name = "archive"
