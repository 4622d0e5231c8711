"""`python -m aionn`: the same as the command `aionn`."""

import sys

from aionn.cli import main

if __name__ == "__main__":
    sys.exit(main())
