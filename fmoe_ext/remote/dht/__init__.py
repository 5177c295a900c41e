"""The DHT: a directory of experts without a centre, Kademlia over grpc with signed records that expire."""

from fmoe_ext.remote.dht.discovery import DHT, KademliaDiscovery, open_node
from fmoe_ext.remote.dht.node import KademliaNode, NodeOptions
from fmoe_ext.remote.dht.records import Identity

__all__ = ["DHT", "Identity", "KademliaDiscovery", "KademliaNode", "NodeOptions", "open_node"]
