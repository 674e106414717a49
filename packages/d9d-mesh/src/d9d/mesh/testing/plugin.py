"""A pytest plugin that ends the worker processes of `run_world` with the session.

It has no entry point: every user's pytest would load torch. Name it in a root ``conftest.py``::

    pytest_plugins = ["d9d.mesh.testing.plugin"]
"""

from ._pool import stop_worlds


def pytest_unconfigure() -> None:
    """End all workers."""
    stop_worlds()
