"""Which replica gets a request: pure policies over what the directory says is cached and what the replicas say is queued."""
