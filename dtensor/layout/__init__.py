"""Layouts as boxes: which part of a tensor each rank holds.

Imports nothing of the other rooms. Read `runs` (a dim), `placements` (what torch's say), `places`
(where a process is in a mesh), `boxes` (layouts), then `extents` (of thousands of ranks, as
arithmetic) and `symbolic` (sizes that a graph leaves open).
"""
