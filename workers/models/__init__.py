"""Models that compute: one of transformers over pool pages, a synthetic one without arithmetic, and modelled time."""
