"""What gunicorn calls for `tests.service.gunicorn_app`. It is the configuration file of the test's gunicorn."""

from __future__ import annotations


def post_worker_init(worker: object) -> None:
    """Attach after the fork, when the worker has the app."""
    from tests.service import gunicorn_app

    gunicorn_app.attach()
