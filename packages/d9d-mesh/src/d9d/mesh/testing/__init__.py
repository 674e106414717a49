"""Warm worlds of CPU ranks for tests: `run_world` runs a function on every rank of a gloo world.

`run_job` runs one in fresh processes instead, as a launcher does, and tells how each of them ended.

Enable the pytest plugin ``d9d.mesh.testing.plugin`` in a root ``conftest.py`` to have the workers end with the
session.
"""

from ._job import Ended, JobTimeoutError, run_job
from ._pool import WorldError, WorldTimeoutError, run_world, stop_worlds
from ._reference import Reference

__all__ = [
    "Ended",
    "JobTimeoutError",
    "Reference",
    "WorldError",
    "WorldTimeoutError",
    "run_job",
    "run_world",
    "stop_worlds",
]
