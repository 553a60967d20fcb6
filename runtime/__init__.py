"""The Python runtime around the kernels: images, devices, transports, sessions, vgpu."""
