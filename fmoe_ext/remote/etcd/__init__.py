"""etcd over its grpc API, as much of it as is needed: ranges, transactions, leases, watches."""
