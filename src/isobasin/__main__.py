"""`python -m isobasin`: the program where its script is not on the path."""

from isobasin.cli import main

if __name__ == "__main__":
    main()
