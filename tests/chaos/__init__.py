"""The chaos harness: real workers on real runs while everything around them is broken.

`python -m tests.chaos --seconds 60 --seed 1`, or `make chaos SECONDS=60 SEED=1`. The seed makes the
same runs and the same faults at the same times; what they hit depends on the machine.
"""
