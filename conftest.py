"""Fixtures that all packages' tests share, the world pool of d9d.mesh, and how many processes run them."""

import os

import pytest

pytest_plugins = ["d9d.mesh.testing.plugin"]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two for all tests of the workspace; none besides pytest's own for what the command line names."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin take the cores from the other process
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile torch anew
    return 2
