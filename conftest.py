"""Fixtures that all packages' tests share: the world pool of d9d.mesh."""

pytest_plugins = ["d9d.mesh.testing.plugin"]
