"""The DHT: a directory of experts without a centre, Kademlia over grpc with signed records that expire.

Every node has an id, the hash of its public key, and every uid and every prefix of a uid has a key of the same 256
bits. The distance of two is their XOR (Maymounkov and Mazieres 2002).
    storage     the eight nodes nearest to a key keep the records under it
    lookup      to find them, a node asks the nearest ones that it knows for nearer ones, until there are none. It knows
                many nodes nearby and few far away, so a search takes about log2 of the number of nodes steps
    records     nobody is trusted: the owner of an expert signs its record, so nodes can drop it and not change it
    discovery   of several owners that claim one uid, the one wins that most of the eight nodes name
    node        answers others, and keeps a time on which nodes agree, by which records expire
    relay       carries calls to hosts that nobody can call
"""

from fmoe_ext.remote.dht.discovery import DHT, KademliaDiscovery, open_node
from fmoe_ext.remote.dht.node import KademliaNode, NodeOptions
from fmoe_ext.remote.dht.records import Identity

__all__ = ["DHT", "Identity", "KademliaDiscovery", "KademliaNode", "NodeOptions", "open_node"]
