"""Experts that outlive servers: several replicas, one leader by lease, every acknowledged update at all members.

The scheme is primary-backup with the configuration kept elsewhere (PacificA, Lin et al. 2008; Kafka's in-sync
replicas): etcd says who leads and who is a member, and nothing here votes. docs/replication.md is the specification.

An expert's history is a log of updates, ordered by (term, version): `server.ledger`. Of its replicas
    one leads       takes gradients, gives each update a version, and answers when all members have it: `leader`
    some follow     apply the leader's updates in order, and take a copy first if they lack some: `follower`
    all may be gone then the best state that is left leads after a wait, and says what is lost: `recovery`
etcd, by `registry`, has the leader's key under a lease, the record of members, and offers of states. Every half second
`replicas` looks at all of that and does the next step, so that no lost message leaves an expert without a leader.
`messages` has the calls between servers; each carries its term, and one of an older term is refused.
"""
