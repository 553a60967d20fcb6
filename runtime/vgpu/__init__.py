"""vgpu: run compiled PTX without a GPU. A test instrument, not a backend."""
