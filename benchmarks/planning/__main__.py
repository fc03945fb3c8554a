import sys

from benchmarks.planning.command import main

sys.exit(main())
