"""`python -m bench all_gather -n 2` is `mgpu bench all_gather -n 2`."""

import sys

from mgpu_core.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
