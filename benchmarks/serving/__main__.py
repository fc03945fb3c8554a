import sys

from benchmarks.serving.command import main

sys.exit(main())
