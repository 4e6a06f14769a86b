"""The operations in C, for the CPU: compiled once by the machine's own compiler, then cached."""
