"""`python -m kvq` is the command line."""

from kvq.cli import main

if __name__ == "__main__":
    main()
