"""What all kernels stand on: how they are compiled, found, loaded and called, and the threads that run them."""
