"""Compiled kernels and nothing else: numbers at addresses in, numbers at addresses out.

`compiling` compiles them once and caches them; `numbers` has the scalar operations that they share. The other files
have kernels for CPUs. Each checks what it is given, because compiled code checks nothing.
"""
