"""Call etcd by its grpc API (client), and name the keys that remote experts have there (keys)."""
