"""CuTe DSL kernels that exist only to be run on vgpu."""
