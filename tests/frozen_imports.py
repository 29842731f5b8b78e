"""Imported last into a server that forks: its objects stay, and are not looked through for garbage
in every child.
"""

import gc

gc.collect()
gc.freeze()
