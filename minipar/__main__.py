"""`python -m minipar`: the command line."""

import sys

from minipar.cli import main

sys.exit(main())
