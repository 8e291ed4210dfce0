"""A batch of documents and the run that counts their words."""

from django.db import models

LONGEST_NAME = 200


class Batch(models.Model):
    """Documents that came together."""

    name = models.CharField(max_length=LONGEST_NAME)
    run_id = models.BigIntegerField(null=True)


class Document(models.Model):
    """A text, and how many words it has, once counted."""

    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="documents")
    title = models.CharField(max_length=LONGEST_NAME)
    text = models.TextField()
    words = models.IntegerField(null=True)

    class Meta:
        constraints = [  # noqa: RUF012 - as Django has it
            models.UniqueConstraint(fields=["batch", "title"], name="title_once_in_a_batch")
        ]
