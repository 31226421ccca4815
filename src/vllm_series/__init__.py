"""Tool behind the patch series: pins, fetch, apply, export, wheel, verify, rebase, baseline."""

__version__ = "0.1.0"
