"""A folder of PDF files becomes one fan-out: each file an item, one report at the end."""
