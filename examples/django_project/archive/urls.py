"""The addresses of this app."""

from django.urls import path

from . import views

urlpatterns = [
    path("batches", views.batches),
    path("batches/<int:batch_id>", views.batch),
]
