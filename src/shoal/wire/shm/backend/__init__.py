"""The interface to torch: the registration of the ``shoal`` backend, and its process group.

The package itself imports nothing; ``process_group`` is imported when it is first needed.
"""
