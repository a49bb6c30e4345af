"""The side of a front end that clients and operators see, the same before any servers: request ids, API keys, CORS,
metrics, the access log. The applications behind it know of it by `edge.exchange` and `edge.metrics` alone."""
