"""The dashboard: its API, its safety, its streams, its pages in a browser."""
