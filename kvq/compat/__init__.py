"""Caches of other programs: their bytes as this package's, and back."""
