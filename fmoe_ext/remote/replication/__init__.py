"""Experts that outlive servers: several replicas, one leader by lease, every acknowledged update on all of them.

The scheme is primary-backup with the configuration kept elsewhere (PacificA, Lin et al. 2008; Kafka's in-sync
replicas): etcd says who leads and who is a member, and nothing here votes.
"""
