"""The bodies of the CPU kernels, in Numba and LLVM's language. Only `shared` is imported to run a compiled kernel."""
