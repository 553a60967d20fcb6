"""Device code (CuTe DSL). Imports neither the runtime nor the public API."""
