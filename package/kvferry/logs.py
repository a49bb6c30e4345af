"""The one format of the lines that daemons, workers and front ends log on stderr."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
