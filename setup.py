"""Shim for ``python setup.py bdist_wheel``; everything it builds from is in pyproject.toml.

A new Python has no setuptools, or one too old for that file. There pip builds the wheel, with the setuptools that
``[build-system]`` asks for.
"""

import subprocess
import sys

NEEDED = 77  # the same as in [build-system]

try:
    import setuptools

    found = int(setuptools.__version__.partition(".")[0])
except ImportError:
    found = 0

if found >= NEEDED:
    setuptools.setup()
elif sys.argv[1:] == ["bdist_wheel"]:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", "dist", "."]
    sys.exit(subprocess.run(command, check=False).returncode)
else:
    sys.exit(f"setup.py: setuptools {NEEDED} or newer is needed; {sys.executable} -m pip install -U setuptools")
