"""Property tests over drawn inputs: rows, caches, attention and files that nobody thought of.

A run of the tests draws a fixed number of examples, in CI the same ones every time.
`HYPOTHESIS_PROFILE=long` draws five times as many and new ones every time, and `make fuzz` does so
again and again for `FUZZ_SECONDS`. A failure prints its smallest case and the
`@reproduce_failure` line that plays it again; `--hypothesis-seed=N` draws what a seed drew.
"""
