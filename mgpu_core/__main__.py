"""`python -m mgpu_core` is the command `mgpu`."""

import sys

from mgpu_core.cli import main

sys.exit(main())
