"""The DHT: a directory of experts without a centre, Kademlia over grpc with signed records that expire.

Every node has an id, the hash of its public key, and every uid and prefix has a key in the same space; how far two are
apart is their XOR (Maymounkov and Mazieres 2002). A record lies with the eight nodes nearest to its key: `storage`. To
find them, a node asks the nearest ones that it knows for nearer ones until there are none: `lookup`. It remembers many
nodes nearby and few far away, so a search takes a number of steps that grows with the logarithm of the network.

Nobody is trusted. The owner of an expert signs its `records`, so nodes can drop them but not change them; of several
claims the one wins for which most of the nearest nodes vouch: `discovery`. Records expire by a time on which the nodes
agree: `clock`. Hosts that nobody can call are reached through a `relay`.
"""

from fmoe_ext.remote.dht.discovery import DHT, KademliaDiscovery, open_node
from fmoe_ext.remote.dht.node import KademliaNode, NodeOptions
from fmoe_ext.remote.dht.records import Identity

__all__ = ["DHT", "Identity", "KademliaDiscovery", "KademliaNode", "NodeOptions", "open_node"]
