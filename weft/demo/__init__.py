"""`weft demo`: a small Llama trained on local ranks, beside a one-process reference."""
