"""The errors of calls to remote experts, all of them RemoteError; Client (client/client.py) tries again after PASSING.

DiscoveryError (discovery.py) is one too. SchemaError (schema.py) is none: it is raised before anything is sent.
"""


class RemoteError(Exception):
    """A call to a remote expert failed; the message names the expert, where it was asked, and what was said."""


class CallTimeout(RemoteError, TimeoutError):
    """No answer came before the deadline."""


class ExpertGone(RemoteError):
    """No server that can be reached hosts the expert."""


class Busy(RemoteError):
    """The server has no room for the call, or the caller sends more than its rate allows: try again later."""


class Refused(RemoteError):
    """The server refuses the call for good: wrong tensors, a missing token, a gradient that is too old."""


class NoLeader(RemoteError):
    """The server does not take gradients of this expert, or lacks acknowledged updates of it: ask another one."""


class Cheated(RemoteError):
    """A server's answer is not what the expert's weights give (Auditor)."""
