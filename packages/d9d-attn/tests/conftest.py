"""Test modules share the modules beside them, in this process and in those that tests start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
