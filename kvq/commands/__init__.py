"""The commands of `kvq`, one file each, registered in `kvq.cli`.

A command is a function `command` whose docstring is its help and whose examples are `EXAMPLES`. It
imports what is heavy inside.
"""
