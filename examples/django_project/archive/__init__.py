"""Batches of documents, and the run over each."""
