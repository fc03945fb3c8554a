import sys

from benchmarks.prefix_traces.command import main

sys.exit(main())
