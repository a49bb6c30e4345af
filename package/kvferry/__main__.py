"""`python -m kvferry`: the command line."""

from kvferry.daemon.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
