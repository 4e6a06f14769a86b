"""The kernels in Triton 3.6 to 3.9, for CUDA and ROCm.

Nothing loads `triton` before a kernel is needed, so a CPU run never pays for it.
"""
