"""`python -m fedquilt` is the command `fedquilt`, where that is not on the path."""

from fedquilt.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
