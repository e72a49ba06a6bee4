"""Layouts as boxes: which part of a tensor each rank holds.

Imports nothing of the other rooms. Read `boxes`, then `symbolic` (sizes that a graph leaves open).
"""
