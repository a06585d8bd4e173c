"""`python -m isobasin` runs the program without its script."""

from isobasin.cli import main

if __name__ == "__main__":
    main()
