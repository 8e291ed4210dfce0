"""The addresses of the project; the dashboard's are below /fanout, see asgi.py."""

from django.urls import include, path

urlpatterns = [path("", include("archive.urls"))]
