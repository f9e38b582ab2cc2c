"""The command line as ``python -m polyfed``."""

import sys

from polyfed.cli.console import forget_working_folder
from polyfed.cli.main import main

forget_working_folder()
sys.exit(main())
