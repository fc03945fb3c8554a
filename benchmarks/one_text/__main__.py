import sys

from benchmarks.one_text.command import main

sys.exit(main())
