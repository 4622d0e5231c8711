"""Run the command `aionn` as `python -m aionn`."""

import sys

from aionn.cli import main

if __name__ == "__main__":
    sys.exit(main())
