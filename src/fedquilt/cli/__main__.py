"""`python -m fedquilt.cli`, where the command itself is not on the path."""

from fedquilt.cli import main

raise SystemExit(main())
