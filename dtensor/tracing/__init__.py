"""What torch's autograd, compiler and exporter must know of DTensors.

Imports nothing of the other rooms. `grad_recording`, `graph_breaks`, `exporting`.
"""
