"""A FastAPI application: upload texts, start a run over them, watch it live."""
