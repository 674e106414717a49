"""Warm worlds of CPU ranks for tests: `run_world` runs a function on every rank of a gloo world.

`run_job` runs one in fresh processes instead, as a launcher does, and tells how each of them ended; `start_job` leaves
them to be killed. `run_on_gpus` runs a script on ranks with CUDA, also where they are more than there are GPUs.

Enable the pytest plugin ``d9d.mesh.testing.plugin`` in a root ``conftest.py`` to have the workers end with the
session.
"""

from ._gpus import run_on_gpus
from ._job import Ended, Job, JobTimeoutError, run_job, start_job
from ._pool import WorldError, WorldTimeoutError, run_world, stop_worlds
from ._reference import Reference

__all__ = [
    "Ended",
    "Job",
    "JobTimeoutError",
    "Reference",
    "WorldError",
    "WorldTimeoutError",
    "run_job",
    "run_on_gpus",
    "run_world",
    "start_job",
    "stop_worlds",
]
