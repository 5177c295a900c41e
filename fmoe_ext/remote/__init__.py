"""Remote experts: train through experts that other machines host.

A forward call goes this way, and its answer comes back by it:
    client/moe.py      mixtures of remote experts: a gate, and a call for each expert that it chose
    client/expert.py   RemoteExpert, a step of autograd; many calls go side by side
    client/client.py   Client.forward(): which replica, by which deadline, what if it fails
    client/caller.py   Caller.call(): one message to one server
    server/service.py  Intake lets it in when there is room; ExpertService checks it and puts it into the queue
    server/host.py     ExpertHost.run(), on the thread that computes: waiting calls of one kind in one batch
A gradient goes the same way to the expert's leader. There ExpertHost makes a step and notes it in the log
(server/ledger.py). With replicas (--registry) replication/leader.py has every member note it too
(replication/follower.py) and only then answers. server/saving.py writes experts to the disk now and then. A client
knows by discovery.py who hosts an expert: by the DHT (dht/), by etcd (etcd/) or from a list. client/audit.py repeats
some calls and finds servers that compute something else.
"""

try:
    import grpc  # noqa: F401
except ImportError as error:
    raise ImportError(
        "fmoe_ext.remote needs grpcio: pip install grpcio safetensors cryptography, or in a clone "
        f"pip install -e '.[remote]' --no-build-isolation ({error})"
    ) from error

from fmoe_ext.remote.client.audit import Auditor, Finding
from fmoe_ext.remote.client.client import Client, Settings
from fmoe_ext.remote.client.expert import Directory, LiveGate, RemoteExpert, RemoteExperts
from fmoe_ext.remote.client.moe import RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
from fmoe_ext.remote.dht import DHT
from fmoe_ext.remote.discovery import Discovery, DiscoveryError, ExpertRecord, StaticList
from fmoe_ext.remote.errors import Busy, CallTimeout, Cheated, ExpertGone, NoLeader, Refused, RemoteError
from fmoe_ext.remote.etcd.client import EtcdDiscovery
from fmoe_ext.remote.expert_classes import make_expert, register_expert_class
from fmoe_ext.remote.schema import SchemaError
from fmoe_ext.remote.security import Credentials, Security
from fmoe_ext.remote.server.declared import DeclaredExperts
from fmoe_ext.remote.server.options import Options, Training
from fmoe_ext.remote.server.server import Server

__all__ = [
    "DHT",
    "Auditor",
    "Busy",
    "CallTimeout",
    "Cheated",
    "Client",
    "Credentials",
    "DeclaredExperts",
    "Directory",
    "Discovery",
    "DiscoveryError",
    "EtcdDiscovery",
    "ExpertGone",
    "ExpertRecord",
    "Finding",
    "LiveGate",
    "NoLeader",
    "Options",
    "Refused",
    "RemoteError",
    "RemoteExpert",
    "RemoteExperts",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "SchemaError",
    "Security",
    "Server",
    "Settings",
    "StaticList",
    "Training",
    "make_expert",
    "register_expert_class",
]
