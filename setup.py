"""Shim for ``python setup.py bdist_wheel``; everything it builds from is in pyproject.toml."""

from setuptools import setup

setup()
