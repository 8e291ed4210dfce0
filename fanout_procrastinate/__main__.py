"""``python -m fanout_procrastinate``: the same as ``fanout``."""

import sys

from fanout_procrastinate.cli import main

if __name__ == "__main__":
    sys.exit(main())
