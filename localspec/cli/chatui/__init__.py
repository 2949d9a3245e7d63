"""The parts of `localspec chat`, one idea a file."""
