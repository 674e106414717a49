"""`python -m d9d.ckpt` is the command `d9d-ckpt`."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
