"""`python -m avow.cli`: the command line."""

from avow.cli import main

if __name__ == "__main__":
    main()
