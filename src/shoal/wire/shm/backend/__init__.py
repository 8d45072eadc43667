"""The interface to torch, which is the registration of the ``shoal`` backend and its process group.

The package itself imports nothing. ``process_group`` is imported when it is first needed.
"""
