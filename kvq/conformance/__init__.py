"""Conformance vectors: what every mode must write and read, for kernels that others wrote."""
