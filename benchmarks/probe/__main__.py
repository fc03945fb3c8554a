import sys

from benchmarks.probe.command import main

sys.exit(main())
