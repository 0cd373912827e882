"""Analysis: what a mode does to keys, values, scores and attention, beside the theory.

`kvq.analysis.report` runs all measures and writes tables, pictures, a page and a manifest; the
other files hold one measure each, on tensors. `plots` alone draws.
"""
