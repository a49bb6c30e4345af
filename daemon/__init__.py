"""The daemon: cores (plain state machines without I/O), and the gRPC, courier and process shells around them."""
