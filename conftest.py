"""Fixtures that all packages' tests share, the world pool of d9d.mesh, and how many processes run them."""

import pytest

pytest_plugins = ["d9d.mesh.testing.plugin"]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two for all tests of the workspace; none besides pytest's own for what the command line names."""
    return 2 if config.args_source is pytest.Config.ArgsSource.TESTPATHS else 0
