"""The tables, and those of the fan-outs."""
