"""`python -m loopscope` is the `loopscope` command."""

import sys

from loopscope.cli import main

if __name__ == "__main__":
    sys.exit(main())
