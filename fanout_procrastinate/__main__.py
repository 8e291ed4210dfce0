"""``python -m fanout_procrastinate``: the same as ``fanout``."""

import sys

from fanout_procrastinate import cli

if __name__ == "__main__":
    sys.exit(cli.main())
