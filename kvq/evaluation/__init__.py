"""Quality of a real model on the packed cache: likelihood, generation, retrieval.

A recipe says how tokens are stored, `evaluate` measures recipes over windows of a text, and
`generation` what greedy decoding does; `run` keeps what is done and writes tables and pictures.
"""
