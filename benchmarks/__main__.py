"""`python -m benchmarks [NAME...] [--quick]`: the same as `minipar bench`."""

import sys

from minipar.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
