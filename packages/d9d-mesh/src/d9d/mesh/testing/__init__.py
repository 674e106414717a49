"""Warm worlds of CPU ranks for tests: `run_world` runs a function on every rank of a gloo world.

Enable the pytest plugin ``d9d.mesh.testing.plugin`` in a root ``conftest.py`` to have the workers end with the
session.
"""

from ._pool import WorldError, WorldTimeoutError, run_world, stop_worlds

__all__ = ["WorldError", "WorldTimeoutError", "run_world", "stop_worlds"]
