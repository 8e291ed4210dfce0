"""Add a batch, look at it. Plain JSON: what matters here is the transaction."""

import json

from django.db import IntegrityError, transaction
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from procrastinate.contrib.django import app

from fanout_procrastinate import FanOut

from .models import LONGEST_NAME, Batch, Document
from .tasks import count_batch

FORM = (
    'give {"name": "...", "documents": [{"title": "...", "text": "..."}]}, name and titles of at '
    f"most {LONGEST_NAME} characters, and no text with a NUL or half a surrogate pair"
)


@csrf_exempt  # for programs; it takes no session
@require_POST
def batches(request: HttpRequest) -> JsonResponse:
    """Add a batch and start its run, in one transaction: both are there, or neither is."""
    try:
        given = json.loads(request.body)
        name = _text(given["name"], LONGEST_NAME)
        texts = [
            (_text(one["title"], LONGEST_NAME), _text(one["text"])) for one in given["documents"]
        ]
    except (ValueError, LookupError, TypeError, RecursionError):
        return JsonResponse({"error": FORM}, status=400)
    batch = Batch.objects.create(name=name)
    run = count_batch.defer(batch_id=batch.pk)
    batch.run_id = run.id
    batch.save(update_fields=["run_id"])
    documents = [Document(batch=batch, title=title, text=text) for title, text in texts]
    try:
        Document.objects.bulk_create(documents)
    except IntegrityError:
        transaction.set_rollback(True)  # the batch, and the run
        return JsonResponse({"error": "a title stands twice"}, status=409)
    return JsonResponse({"batch": batch.pk, "run": str(run.id)}, status=201)


def _text(given: object, most: int | None = None) -> str:
    """Return what the database can keep; a `ValueError` where it could not."""
    text = str(given)
    text.encode()
    if "\0" in text or (most is not None and len(text) > most):
        raise ValueError(text)
    return text


def batch(request: HttpRequest, batch_id: int) -> JsonResponse:
    """Tell how far the run of a batch is, and what was counted."""
    found = get_object_or_404(Batch, pk=batch_id)
    progress = FanOut.of(app).get_run(found.run_id).progress()
    words = dict(found.documents.values_list("title", "words"))
    return JsonResponse({"status": progress.status, "done": progress.done, "words": words})
