import sys

from benchmarks.first_run.command import main

sys.exit(main())
