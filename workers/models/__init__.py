"""What computes: a model of transformers over pool pages, a synthetic one without arithmetic, and modelled time."""
