"""What Triton's interpreter lacks to be a test of kernels: right rounding, and checks of memory."""
