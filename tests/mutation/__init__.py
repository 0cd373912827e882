"""Mutation testing of the arithmetic: is there a test for each thing that could be wrong?

    python -m tests.mutation [--only kvq/trellis.py ...] [--out results/mutation.json]

changes one thing in a copy of the tree, runs the tests that should see it, and counts. `operators`
makes mutants of Python code, `kernel_mutants` lists those of Triton kernels, written by hand,
`subsets` says which tests answer for which file, and `reviewed.toml` which mutants change nothing
that a test could see, and why.
"""
