"""kvferry.loadgen: the multi-turn load generator and its reports."""
