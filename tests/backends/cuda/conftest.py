"""Loads hypothesis before the tests.

Otherwise its plugin loads it after them. Finalizers of dropped results could then run inside of Python 3.11's parser, which fails.
"""

import hypothesis

__all__ = ["hypothesis"]
