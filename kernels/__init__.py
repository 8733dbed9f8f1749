"""What runs on a device: arrays, lanes and flags, written once for the CPU, for CUDA and for CUDA's simulator.

Knows nothing of ranks' names or sockets, and imports none of the other packages. Start reading at
`kernels.primitives`, then `kernels.executor`.
"""

import os
import sys

__version__ = "0.1.0"
__distribution__ = "mgpu-core"  # tells this package from another distribution's `kernels`: see collectives.installation

# Every package of the house comes through here first.
if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
    system = sys.platform if sys.platform != "linux" else f"Linux on {os.uname().machine}"
    raise ImportError(f"mgpu-core runs on Linux on x86-64 or aarch64, and this is {system}")
