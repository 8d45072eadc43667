"""What workers reach over sockets of their own: parameter servers, and peers of AD-PSGD.

::

    addresses.py        publish and look up addresses in torch's TCPStore
    server.py           a server process: one thread for each worker
    reduce_service.py   the server of bsp: sums what all workers send
    model_store.py      the server of ssp and asp: model, optimizer and clocks
    client.py           a worker's side: start servers, connect, copy their state
    pairs.py            pairs of workers that average (AD-PSGD)
"""
