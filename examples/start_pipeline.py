"""Start a run: ``python examples/start_pipeline.py --config FILE.yaml [key=value ...]``."""

import sys

from roll.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
