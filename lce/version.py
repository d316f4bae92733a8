"""The version of lce, for the package, the command line and the files that it writes."""

__version__ = "0.1.0"
