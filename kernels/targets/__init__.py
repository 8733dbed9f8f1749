"""What each target is made of: the CPU through Numba and LLVM, CUDA through numba-cuda, and plain Python."""
