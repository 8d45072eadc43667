"""Suite ``collectives``: torch's collectives on the shoal backend, on gloo and on Open MPI."""
