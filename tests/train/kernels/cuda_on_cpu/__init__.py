"""The CUDA kernels on a machine without a GPU: compiled for a CPU, run thread by thread."""
