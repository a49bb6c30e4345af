"""The daemon. Its floors, top down: cli > server > services > observe > sides > peers > memory > config > core.

At run time a module imports its own floor and those below it (tests/test_contracts.py).
"""
