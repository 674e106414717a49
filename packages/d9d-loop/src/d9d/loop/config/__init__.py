"""Typed configuration from a TOML file and the command line.

A configuration is a tree of frozen attrs classes. `load` fills it strictly: ``"false"`` is not ``True``, ``3.9`` is not
``3``, an unknown key is an error that names its full path and the nearest known name, and all problems are reported at
once.
"""

from .._choice import Choice
from ._help import help_text
from ._load import from_command_line, load
from ._problems import ConfigError

__all__ = ["Choice", "ConfigError", "from_command_line", "help_text", "load"]
