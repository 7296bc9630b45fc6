"""A Django project for tests. The environment names its database and its Redis server."""

import os

SECRET_KEY = "for tests only"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "forq.contrib.django",
    "tests.support.django_project.orders",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "tests.support.django_project.urls"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

_folder = os.environ.get("DJANGO_TEST_FOLDER", "")
DATABASES: dict[str, dict[str, object]]
if os.environ.get("DJANGO_TEST_POSTGRES"):
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            # The folder of the server's socket.
            "HOST": os.environ["DJANGO_TEST_POSTGRES"],
            "NAME": "postgres",
            "USER": "postgres",
            "CONN_MAX_AGE": None,
        }
    }
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.path.join(_folder, "database.sqlite3"),
            # Several processes write.
            "OPTIONS": {"timeout": 20},
        }
    }

FORQ = {
    "NAME": "shop",
    "QUEUES": {"mails": {"concurrency": 2}},
    "OUTBOX": {"EVERY": os.environ.get("DJANGO_TEST_EVERY", "5s")},
}
