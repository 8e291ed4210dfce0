"""The work: count the words of each document of a batch."""

from collections.abc import Iterator

from procrastinate.contrib.django import app

from fanout_procrastinate import fanout_child, fanout_manager

from .models import Document


@fanout_child(app, queue="archive", name="archive.count_words")
def count_words(document_id: int) -> int:
    document = Document.objects.get(pk=document_id)
    words = len(document.text.split())
    document.words = words
    document.save(update_fields=["words"])
    return words


@fanout_manager(app, child=count_words, name="archive.count_batch", item_key=str)
def count_batch(batch_id: int) -> Iterator[int]:
    documents = Document.objects.filter(batch_id=batch_id).order_by("pk")
    yield from documents.values_list("pk", flat=True).iterator()
