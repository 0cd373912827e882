"""One figure to a file: measure, draw, save. See `README.md`."""
