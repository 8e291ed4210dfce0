"""The addresses of the project; the dashboard's are below /fanout, see asgi.py."""

from django.contrib.auth.views import LoginView
from django.urls import include, path

urlpatterns = [
    path("login/", LoginView.as_view(template_name="login.html"), name="login"),
    path("", include("archive.urls")),
]
