"""Import this last in a process that others are forked from: they leave alone what it has loaded.

Python's look for garbage would go through all of it in each of them, and write to memory that they share.
"""

import gc

gc.freeze()
