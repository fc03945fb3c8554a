import sys

from benchmarks.kernels.command import main

sys.exit(main())
