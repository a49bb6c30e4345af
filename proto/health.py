"""Words of a daemon's health, as its service of grpc.health.v1 and those who ask it say them."""

ENGINE_SERVICE = "engine"  # whether each of the daemon's roles has an engine, and its pool
HEALTH_WHY = "kvferry-why-bin"  # metadata of an answer: why not, in UTF-8
