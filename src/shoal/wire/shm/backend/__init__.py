"""The interface to torch: the registration of the ``shoal`` backend, and its process group.

Importing this package imports neither; ``process_group`` is imported when it is first needed.
"""
